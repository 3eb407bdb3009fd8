"""Text to token ids with a byte-level BPE: million tokens per CPU-second by the `tokenizers` library and by tiktoken, which
`ol.Tokenize` prefers (`overlord.chunks.transforms.bpe`). One thread, whole columns through `Tokenize`, rounds in turn.

    python -m bench.tokenizing [--tokenizer FILE] [--texts FOLDER ...] [--rounds N] [--json]

Without a file, a vocabulary of 16,000 tokens is trained on the texts first, once with GPT-2's pattern and once with Llama
3's. Texts are of this machine: code, its words alone, and prose from packages' descriptions; --texts adds those of a folder.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

import overlord as ol
from bench.measure import Spread
from bench.telling import parser_of, tell

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MOST_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Tokenizing:
    tokenizer: str
    texts: str
    num_bytes: int
    tokenizers: Spread
    tiktoken: Spread
    ratio: Spread


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--texts", type=Path, nargs="+", default=(), help="folders of text files")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for the library, as tiktoken has
    texts = {name: _first(found, MOST_BYTES) for name, found in real_texts(given.texts).items()}
    made = {given.tokenizer: tokenizers.Tokenizer.from_file(given.tokenizer)} if given.tokenizer else trained(texts)
    pairs = [(name, kind) for name in made for kind in texts]
    tell([compare(name, made[name], kind, texts[kind], given.rounds) for name, kind in pairs], _show, given.json)
    return 0


def compare(name: str, tokenizer: Any, kind: str, texts: list[str], rounds: int) -> Tokenizing:
    table = pa.table({"text": texts})
    slow, fast = (ol.Tokenize(encoding=tokenizer, engine=engine) for engine in ("tokenizers", "tiktoken"))
    found = slow(table)
    if found != fast(table):
        raise AssertionError(f"{name}, {kind}: the engines differ")
    tokens = pc.sum(pc.list_value_length(found["tokens"])).as_py() / 1e6
    pairs = [(tokens / _cpu_seconds(lambda: slow(table)), tokens / _cpu_seconds(lambda: fast(table))) for _ in range(rounds)]
    library, core = zip(*pairs, strict=True)
    ratio = Spread.of([b / a for a, b in pairs])
    return Tokenizing(name, kind, sum(len(text.encode()) for text in texts), Spread.of(library), Spread.of(core), ratio)


def real_texts(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Texts by kind: of this Python, of what is installed, and of each folder."""
    home, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    code = [_read(path) for path in sorted(home.glob("*.py"))]
    words = [" ".join(re.findall(r"[A-Za-z]+", text)) for text in code]
    prose = [_read(path) for path in sorted(packages.glob("*.dist-info/METADATA"))]
    others = {folder.name: _texts_of(folder) for folder in folders}
    return {"code": code, "words": words, "prose": prose} | others


def _texts_of(folder: Path) -> list[str]:
    files = [_read(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [text for text in files if "\x00" not in text]  # no pictures


def _read(path: Path) -> str:
    return path.read_bytes().decode(errors="ignore")


def _first(texts: list[str], num_bytes: int) -> list[str]:
    kept, size = [], 0
    for text in texts:
        if size < num_bytes:
            kept.append(text)
            size += len(text.encode())
    return kept


def trained(texts: dict[str, list[str]]) -> dict[str, Any]:
    styles = {"GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False), "Llama 3": llama_3_style()}
    everything = [text for kind in texts.values() for text in kind]
    return {name: train_tokenizer(style, everything) for name, style in styles.items()}


def llama_3_style() -> Any:
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), in_bytes])


def train_tokenizer(style: Any, texts: list[str]) -> Any:
    """A byte-level BPE of 16,000 tokens that splits texts by the style first."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = style
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _show(each: Tokenizing) -> None:
    title = f"{Path(each.tokenizer).name}, {each.texts}"
    speeds = f"tokenizers {each.tokenizers}, tiktoken {each.tiktoken} M tokens / CPU s, ratio {each.ratio}"
    print(f"{title:<22} {each.num_bytes / 1e6:.1f} MB: {speeds}")


if __name__ == "__main__":
    sys.exit(main())
