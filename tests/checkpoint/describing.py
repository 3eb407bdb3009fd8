"""Descriptions of values and of users' modules, for the tests of what a fingerprint sees."""

import importlib.util
from pathlib import Path
from types import ModuleType

import tokenizers

from overlord.checkpoint.description import Describer


def described(value: object) -> str:
    return Describer().digest(value, "x")


def unseen(value: object) -> list[str]:
    describer = Describer()
    describer.digest(value, "x")
    return describer.unseen


def module_of(folder: Path, text: str, name: str = "strange") -> ModuleType:
    """A user's module, of a file that is there."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bpe(last: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, last: 1}, unk_token="a"))
