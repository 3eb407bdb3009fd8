"""Encodes with a byte-level BPE `tokenizer.json` by tiktoken's core, with exactly the ids of the `tokenizers` library.

`ByteLevelBpe.of` takes a tokenizer whose parts are all known to mean the same to both libraries, and raises `NotByteLevel`
with the reason for any other. Rows that only the library is sure to encode as it does are left to the library, a row at a
time: those that contain an added token with rules of its own, a character that the two regular expression engines know
differently, or text that is not in the normal form that the tokenizer asks for.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from overlord.chunks.transforms.merge_ranks import Flags, NotRankable, RankedTokens, bytes_of_tokens, rank_tokens
from overlord.sources.numbers import array_of, numbers_of, text_data, text_offsets, text_scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import tiktoken
    import tokenizers

    from overlord.stream.facts import Ints

LEAST_TIKTOKEN = (0, 14)
"""The oldest release whose ids and times were compared with those of the library; 0.11 takes minutes for long runs."""

Tokens = NDArray[np.int32]

_SEPARATOR = "\x00overlord: next row\x01"
"""Stands between the rows of a column, as a special token. Rows that contain its first letter are left to the library."""

_MARK = "\x02"
"""Stands in a text where spaces are cut, see `Spaces`."""

_OUR_LETTERS = frozenset((_SEPARATOR[0], _SEPARATOR[-1], _MARK))

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that is built into `tokenizers.pre_tokenizers.ByteLevel`."""

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_AT_END = r"\s+(?!\S)"
_ALTERNATIVES: Mapping[str, str] = {
    **dict.fromkeys(_CONTRACTIONS, ""),
    _ENDING: "",
    r"'(?i:[sdmt]|ll|ve|re)": "",
    **{f"{before}\\p{{L}}+": "ul" for before in ("", " ?", _BEFORE)},
    **{f"{before}[\\p{{L}}\\p{{M}}]+": "ulm" for before in ("", " ?", _BEFORE, r"[^\r\n\p{L}\p{M}\p{N}]?")},
    **{f"{_BEFORE}{_CAPITALS}*{_SMALL}+{ending}": "l" for ending in ("", f"{_ENDING}?")},
    **{f"{_BEFORE}{_CAPITALS}+{_SMALL}*{ending}": "u" for ending in ("", f"{_ENDING}?")},
    **dict.fromkeys((r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}"), "n"),
    **{f" ?[^\\s\\p{{L}}\\p{{N}}]+{after}": "mo" for after in ("", r"[\r\n]*", r"[\r\n/]*")},
    **{f" ?[^\\s\\p{{L}}\\p{{M}}\\p{{N}}]+{after}": "o" for after in ("", r"[\r\n]*", r"[\r\n/]*")},
    r"\s*[\r\n]": "",
    r"\s*[\r\n]+": "",
    _AT_END: "",
    r"\s+": "s",
}
"""The parts of splitting patterns that mean the same to Oniguruma and to fancy-regex, and of which kinds of characters each
matches every single one: capitals and other letters, small letters, marks, numbers, others, spaces. A pattern of such parts
that covers all kinds leaves no gap between its matches; tiktoken would drop the text in a gap."""
_KINDS = "ulmnos"

_DIGITS = "Digits"
"""The characters that the pre-tokenizer Digits splits by, beside classes like \\p{L}."""


_NUMBERS_APART = r"\s+(?![^\s\p{N}])"
"""Like _AT_END, for texts that end where a number begins."""


class NotByteLevel(ValueError):
    """Why a tokenizer is left to its library, as the end of a sentence that begins with "it ..."."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How texts are cut into words."""

    pattern: str
    classes: frozenset[str]
    """The classes of characters that the pattern names."""
    has_prefix_space: bool = False
    spaces: Spaces | None = None
    """How to do without the lookahead of the pattern; None if it has none that is known, and is used as it is."""

    @staticmethod
    def of(rules: Mapping[str, Any] | None) -> Splitting:
        """From the pre-tokenizer of a tokenizer.json."""
        parts = _flat(rules, "pretokenizers")
        if not parts or parts[-1].get("type") != "ByteLevel":
            raise NotByteLevel("has no byte-level pre-tokenizer")
        *before, last = parts
        patterns = [_split_pattern(part) for part in before] + ([_GPT_2] if last.get("use_regex", True) else [])
        prefix = bool(last.get("add_prefix_space", True))
        if prefix and before:
            raise NotByteLevel("puts a space before every word")
        if not 1 <= len(patterns) <= 2:
            raise NotByteLevel(f"splits texts by {len(patterns)} patterns")
        *numbers, pattern = patterns
        alternatives = _alternatives(pattern)
        classes: set[str] = set()
        if numbers:
            alternatives = _with_numbers_apart(numbers[0], alternatives)
            classes.add(_DIGITS if numbers[0].startswith(_DIGITS) else r"\p{N}")
        elif {kind for each in alternatives for kind in _ALTERNATIVES[each]} != set(_KINDS):
            raise NotByteLevel(f"splits texts by a pattern that may leave gaps: {pattern}")
        spaces = Spaces.of(alternatives)
        if spaces is not None:
            alternatives = spaces.without_lookahead(alternatives)
        whole = "|".join(alternatives)
        classes |= {r"\s", *re.findall(r"\\p\{\w+\}", whole)} | ({"(?i:[sdmtlrev])"} if "(?i:" in whole else set())
        return Splitting(whole, frozenset(classes), prefix, spaces)


def _flat(rules: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The parts of a sequence, and of sequences in it."""
    if rules is None:
        return []
    return [rules] if rules.get("type") != "Sequence" else [each for part in rules[inner] for each in _flat(part, inner)]


def _split_pattern(part: Mapping[str, Any]) -> str:
    if part.get("type") == "Digits":
        return f"{_DIGITS}{'' if part.get('individual_digits') else '+'}"
    pattern = part.get("pattern", {}).get("Regex") if part.get("type") == "Split" else None
    keeps_matches = (part.get("behavior"), part.get("invert")) in (("Isolated", False), ("Removed", True))
    if pattern is None or not keeps_matches:
        raise NotByteLevel(f"splits texts by {part.get('type')} with {part.get('behavior', 'rules of its own')}")
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _alternatives(pattern: str) -> list[str]:
    """The top-level alternatives of a pattern, each one known."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(pattern):  # no known part has an escaped bracket
        depth += (letter in "([") - (letter in ")]")
        if letter == "|" and not depth:
            found.append(pattern[begin:at])
            begin = at + 1
    found.append(pattern[begin:])
    unknown = [each for each in found if each not in _ALTERNATIVES]
    if unknown:
        raise NotByteLevel(f"splits texts by a pattern with a part that is not known to be safe: {unknown[0]}")
    return found


def _with_numbers_apart(numbers: str, alternatives: Sequence[str]) -> list[str]:
    """One pattern for two steps, of which the first sets numbers apart: a text then ends where a number begins."""
    wanted = {_DIGITS: r"\p{N}", f"{_DIGITS}+": r"\p{N}+"}.get(numbers, numbers)
    if wanted not in (r"\p{N}", r"\p{N}+", r"\p{N}{1,2}", r"\p{N}{1,3}"):
        raise NotByteLevel(f"splits texts by two patterns, the first of which is not of numbers: {numbers}")
    rest = [each for each in alternatives if _ALTERNATIVES[each] != "n"]
    if {kind for each in rest for kind in _ALTERNATIVES[each]} != set(_KINDS) - {"n"}:
        raise NotByteLevel("splits texts by a pattern that may leave gaps")
    if wanted == r"\p{N}+" and any(_ALTERNATIVES[each] == "n" and "+" not in each for each in alternatives):
        raise NotByteLevel("splits numbers twice")
    return [wanted, *(_NUMBERS_APART if each == _AT_END else each for each in rest)]


@dataclass(frozen=True, slots=True)
class Spaces:
    """Where a pattern cuts spaces by looking ahead: before the last of several, if a word follows.

    A lookahead makes tiktoken's regular expressions half as fast. Without it, texts get a mark at these places, which is a
    word of its own to the pattern and is dropped from the ids. All alternatives that match the last space match it as the
    first letter of a word, so none goes over the mark; those that end with a line break match all spaces up to it, so spaces
    that end with one get no mark.
    """

    keeps_line_breaks: bool
    stops_at_numbers: bool

    @staticmethod
    def of(alternatives: Sequence[str]) -> Spaces | None:
        if len(alternatives) < 2 or alternatives[-2] not in (_AT_END, _NUMBERS_APART) or alternatives[-1] != r"\s+":
            return None
        rest = alternatives[:-2]
        matches_breaks = [each for each in rest if each.endswith((r"[\r\n]*", r"[\r\n/]*", r"[\r\n]", r"[\r\n]+"))]
        keeps = any(each.startswith(r"\s*") for each in matches_breaks)
        if (matches_breaks and not keeps) or _AT_END in rest or r"\s+" in rest:
            return None
        return Spaces(keeps, alternatives[-2] == _NUMBERS_APART)

    def without_lookahead(self, alternatives: Sequence[str]) -> list[str]:
        mark = f"\\x{ord(_MARK):02x}"
        return [*(each.replace("[^", f"[^{mark}") for each in alternatives[:-2]), r"\s+", mark]

    def mark(self, text: str, codes: Codes, known: NDArray[np.uint8], added: Sequence[str]) -> str:
        """The text with marks, from what is known of its characters. `added` are the tokens that a text is cut at before it
        is split: it ends where one begins."""
        is_space = known & Characters.SPACE != 0
        is_word = known & (Characters.SPACE | Characters.NUMBER if self.stops_at_numbers else Characters.SPACE) == 0
        at = np.flatnonzero(is_space[1:-1] & is_space[:-2] & is_word[2:]) + 1
        cuts = codes[at + 1] != ord(_SEPARATOR[0])
        if self.keeps_line_breaks:
            cuts &= (codes[at] != 10) & (codes[at] != 13)
        at = at[cuts]
        if added and len(at):
            first = list({ord(token[0]) for token in added})
            maybe = np.flatnonzero(np.isin(codes[at + 1], first))  # a few, and a look at the text for each
            begins = [text.startswith(tuple(added), i) for i in (at[maybe] + 1).tolist()]
            at = np.delete(at, maybe[np.array(begins, bool)])
        if not len(at):
            return text
        marked = np.insert(codes, at, ord(_MARK))
        return marked.tobytes().decode("ascii" if codes.itemsize == 1 else "utf-32-le")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens that are looked for in a text before it is split."""

    plain: Mapping[str, int]
    """By their ids: found by tiktoken as the library finds them."""
    awkward: tuple[str, ...]
    """Rows that contain one of these are left to the library."""
    ids: Mapping[str, int]
    """By the text of a token: also of those that are not looked for."""

    @staticmethod
    def of(added: Sequence[Mapping[str, Any]], with_special: bool, normalize: Callable[[str], str] | None) -> AddedTokens:
        active = {each["content"]: each for each in added if with_special or not each["special"]}
        overlapping = _overlapping([each["content"] for each in added], set(active))
        plain, awkward = {}, []
        for content, each in active.items():
            is_changed = normalize is not None and each["normalized"] and normalize(content) != content
            if is_changed:
                raise NotByteLevel(f"has an added token that its normalizer changes: {content!r}")
            has_rules = each["single_word"] or each["lstrip"] or each["rstrip"]
            if has_rules or content in overlapping or not _OUR_LETTERS.isdisjoint(content):
                awkward.append(content)
            else:
                plain[content] = each["id"]
        return AddedTokens(plain, tuple(awkward), {each["content"]: each["id"] for each in added})


def _overlapping(contents: Sequence[str], active: set[str]) -> set[str]:
    """The active tokens that can share a letter with an occurrence of another token, or of themselves: which of the two
    is found depends on the order in which they are looked for."""
    if not active:
        return set()
    every = set(contents)
    begins: dict[str, set[str]] = {}
    for content in every:
        for end in range(1, len(content)):
            begins.setdefault(content[:end], set()).add(content)
    found: set[str] = set()
    for content in every:
        for begin in range(len(content)):
            for end in range(begin + 1, len(content) + 1):
                if (begin, end) != (0, len(content)) and content[begin:end] in every:
                    found |= {content, content[begin:end]}
            if begin and content[begin:] in begins:
                found |= {content, *begins[content[begin:]]}
    return found & active


class Characters:
    """What is known of each character, learnt when it is first met: whether both regular expression engines put it into
    the same classes, whether it can be changed by NFC, and whether it is a space or a number.

    Threads may learn the same characters at once: each writes the same values.
    """

    UNKNOWN, KNOWN, MAY_CHANGE, DIFFERENT, SPACE, NUMBER = 0, 1, 2, 4, 8, 16

    def __init__(self, classes: Iterable[str], normalize: Callable[[str], str] | None) -> None:
        self._classes = sorted(classes)
        self._normalize = normalize
        self._known = np.zeros(0x110000, np.uint8)
        self._learn(np.arange(128, dtype=np.uint32))
        if (self._known[:128] & (self.MAY_CHANGE | self.DIFFERENT)).any():
            raise NotByteLevel("splits ASCII text in another way than tiktoken does")

    def look_up(self, codes: Codes) -> NDArray[np.uint8]:
        found = self._known[codes]
        if codes.itemsize > 1 and (unknown := found == self.UNKNOWN).any():
            is_new = np.zeros(len(self._known), bool)  # not np.unique, which imports all of numpy.ma
            is_new[codes[unknown]] = True
            self._learn(np.flatnonzero(is_new).astype(np.uint32))
            found = self._known[codes]
        return found

    def _learn(self, codes: Codes) -> None:
        letters = codes.astype("<u4").tobytes().decode("utf-32-le")
        differ = set[str]()
        for each in self._classes:
            ours, theirs = _tiktoken_members(each, letters), _library_members(each, letters)
            # Beyond ASCII, a letter that is an ASCII one but for its case counts as different: it is rare enough.
            differ |= {letter for letter in ours | theirs if letter > "\x7f"} if each.startswith("(?i:") else ours ^ theirs
        spaces, numbers = _tiktoken_members(r"\s", letters), _tiktoken_members(r"\p{N}", letters)
        flags = np.full(len(codes), self.KNOWN, np.uint8)
        for at, letter in enumerate(letters):
            flags[at] |= self.DIFFERENT * (letter in differ)
            flags[at] |= self.SPACE * (letter in spaces) | self.NUMBER * (letter in numbers)
            if self._normalize is not None and (_may_compose(letter) or self._normalize(letter) != letter):
                flags[at] |= self.MAY_CHANGE
        self._known[codes] = flags


Codes: TypeAlias = "NDArray[np.unsignedinteger[Any]]"


def codes_of(text: str) -> Codes:
    """The number of each character; of ASCII text in a byte."""
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _tiktoken_members(name: str, letters: str) -> set[str]:
    """The letters of a class: tiktoken drops what its pattern does not match."""
    ids = _class_of_tiktoken(name).encode_to_numpy(letters, disallowed_special=())
    return set(ids.astype(np.uint8).tobytes().decode())


@lru_cache(maxsize=64)
def _class_of_tiktoken(name: str) -> tiktoken.Encoding:
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    pattern = r"\p{N}" if name == _DIGITS else name
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={_SEPARATOR: 256})


def _library_members(name: str, letters: str) -> set[str]:
    from tokenizers import Regex, pre_tokenizers

    if name == _DIGITS:  # a digit is a word of its own between other letters
        pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(f"x{'x'.join(letters)}x")
        return {piece for piece, _ in pieces if len(piece) == 1 and piece != "x"}
    pieces = pre_tokenizers.Split(Regex(f"(?:{name})+"), "removed", invert=True).pre_tokenize_str(letters)
    return set("".join(piece for piece, _ in pieces))


def _may_compose(letter: str) -> bool:
    """Whether NFC can join a character to the one before it, or move it. Of characters that Python does not know, nothing is
    known either."""
    return unicodedata.combining(letter) != 0 or unicodedata.category(letter) == "Cn" or letter in _second_letters()


@lru_cache(maxsize=1)
def _second_letters() -> frozenset[str]:
    """The characters that are second in a canonical composition."""
    found = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # of Hangul, by rule
    for code in range(0x80, 0x30000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            found.add(chr(int(parts[1], 16)))
    return frozenset(found)


class ByteLevelBpe:
    """A tokenizer of the `tokenizers` library, encoded by tiktoken's core with the same ids.

    A call works in the thread that makes it, without the GIL, except for rows that are left to the library. Instances are
    shared between threads; they are made anew in each process rather than pickled.
    """

    def __init__(
        self,
        load: Callable[[], tokenizers.Tokenizer],
        splitting: Splitting,
        added: AddedTokens,
        ranked: RankedTokens,
        normalize: Callable[[str], str] | None,
    ) -> None:
        """`load` returns the library's tokenizer, which must not be changed afterwards."""
        import tiktoken

        self._load = load
        self._loading = threading.Lock()
        self._loaded: tokenizers.Tokenizer | None = None
        self._added = added
        self._has_prefix_space = splitting.has_prefix_space
        self._normalize = normalize
        self._spaces = splitting.spaces
        self._characters = Characters(splitting.classes, normalize)
        size = len(ranked.tokens)
        special = {token: size + i for i, token in enumerate(added.plain)}
        self._allowed = {*special, _SEPARATOR}
        self._separator = size + len(special)
        self._ids = np.concatenate([ranked.ids, np.array([*added.plain.values()], np.int32)])
        self._ranks = {token: rank for rank, token in enumerate(ranked.tokens)}
        self._encoding = tiktoken.Encoding(
            "tokenizer.json",
            pat_str=splitting.pattern,
            mergeable_ranks=self._ranks,
            special_tokens={**special, _SEPARATOR: self._separator},
        )

    @staticmethod
    def of(tokenizer: tokenizers.Tokenizer) -> ByteLevelBpe:
        """Raises NotByteLevel. The tokenizer must not be changed afterwards."""
        _check_tiktoken()
        try:
            rules = orjson.loads(tokenizer.to_str())
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception for parts written in Python
            raise NotByteLevel(f"cannot be looked into: {error}") from None
        return ByteLevelBpe._of_rules(rules, not tokenizer.encode_special_tokens, lambda: tokenizer)

    @staticmethod
    def of_file(data: bytes, *, special_tokens: bool, load: Callable[[], tokenizers.Tokenizer]) -> ByteLevelBpe:
        """From the bytes of a tokenizer.json. `load` has the library read them too, with the same `special_tokens`, which
        takes longer than all else: it is called when the library is first needed, for most texts never.

        Raises NotByteLevel, also for a file that the library may read otherwise than it is written: `of` knows.
        """
        _check_tiktoken()
        try:
            return ByteLevelBpe._of_rules(_rules_as_read(data), special_tokens, load)
        except NotByteLevel:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise NotByteLevel(f"{_NOT_AS_READ}: {error!r}") from None

    @staticmethod
    def _of_rules(rules: Mapping[str, Any], special_tokens: bool, load: Callable[[], tokenizers.Tokenizer]) -> ByteLevelBpe:
        from tokenizers import normalizers

        _check_model(rules["model"])
        _check_ends(rules.get("post_processor"))
        names = [part.get("type") for part in _flat(rules["normalizer"], "normalizers")]
        if names not in ([], ["NFC"]):
            raise NotByteLevel(f"has the normalizer {', '.join(map(str, names))}")
        splitting = Splitting.of(rules["pre_tokenizer"])
        normalize = normalizers.NFC().normalize_str if names else None
        added = AddedTokens.of(rules["added_tokens"], special_tokens, normalize)
        if splitting.has_prefix_space:  # it is put before each part of a text that is cut by an added token
            added = replace(added, plain={}, awkward=(*added.awkward, *added.plain))
        try:
            ranked = rank_tokens(rules["model"]["vocab"], [_pair(merge) for merge in rules["model"]["merges"]])
        except NotRankable as error:
            raise NotByteLevel(str(error)) from None
        if rules["model"].get("ignore_merges") and (ranked.left_out or splitting.has_prefix_space):
            tokenizer = load()
            _check_whole_words(ranked.left_out, tokenizer, splitting)
            return ByteLevelBpe(lambda: tokenizer, splitting, added, ranked, normalize)
        return ByteLevelBpe(load, splitting, added, ranked, normalize)

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, loaded when it is first needed."""
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
                del self._load  # with the bytes of the file
            return self._loaded

    def encode_column(self, texts: pa.Array) -> tuple[Tokens, Ints]:
        """(all ids, number of ids of each text) of strings or large strings without nulls."""
        joined = _join(texts)
        codes = codes_of(joined)
        known = self._characters.look_up(codes)
        left = self._rows_left(texts, joined, known)
        if left is None:
            return self._by_tiktoken(texts) if self._has_prefix_space else self._encode(texts, joined, codes, known)
        flat, lengths = np.zeros(0, np.int32), np.zeros(len(texts), np.int64)
        ours = texts.filter(array_of(~left))
        theirs = texts.filter(array_of(left))
        parts = []
        for rows, (ids, counts) in ((~left, self._by_tiktoken(ours)), (left, self._by_library(theirs))):
            lengths[rows] = counts
            parts.append((rows, ids))
        flat = np.empty(lengths.sum(), np.int32)
        for rows, ids in parts:
            flat[np.repeat(rows, lengths)] = ids
        return flat, lengths

    def cut(self, text: pa.Array, num_bytes: int) -> pa.Array:
        """One text as parts of about so many bytes, whose ids one after the other are those of the text.

        It is cut before single spaces between two ASCII letters. Every known pattern ends a word there and begins another,
        whatever stands further away. An added token may stretch over such a place, or take the space away.
        """
        data = _bytes_of(text)
        tokens = (*self._added.plain, *self._added.awkward)
        is_bound = any(" " in token for token in tokens) or (self._normalize is not None and self._added.awkward)
        if is_bound or any(_contains(text, token).any() for token in self._added.awkward):
            return text
        ends = [0]
        while len(data) - ends[-1] > 2 * num_bytes:
            found = _place_to_cut(data[ends[-1] + num_bytes :], num_bytes)
            if found is None:
                break
            ends.append(ends[-1] + num_bytes + found)
        if len(ends) == 1:
            return text
        offsets: Any = np.array([*ends, len(data)], np.int64)
        return pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(offsets), text[0].as_buffer())

    def id_of(self, token: str) -> int | None:
        if token in self._added.ids:
            return self._added.ids[token]
        (value,) = bytes_of_tokens([token])
        rank = None if value is None else self._ranks.get(value)
        return int(self._ids[rank]) if rank is not None else self.tokenizer.token_to_id(token)

    def _rows_left(self, texts: pa.Array, joined: str, known: NDArray[np.uint8]) -> Flags | None:
        """The rows to leave to the library; None if there are none."""
        left = np.zeros(len(texts), bool)
        for token in self._added.awkward:
            if token in joined:
                left |= _contains(texts, token)
        if joined.count(_SEPARATOR[0]) != max(0, len(texts) - 1):
            left |= _contains(texts, _SEPARATOR[0])
        if _MARK in joined:
            left |= _contains(texts, _MARK)
        if not joined.isascii() and (known & (Characters.DIFFERENT | Characters.MAY_CHANGE)).any():
            import pyarrow.compute as pc

            letters: Any = pc.utf8_length(texts)  # type: ignore[call-overload]
            sizes = numbers_of(letters) + len(_SEPARATOR)
            rows = np.repeat(np.arange(len(texts)), sizes)[: len(known)]
            left[rows[known & Characters.DIFFERENT != 0]] = True
            for row in {*rows[known & Characters.MAY_CHANGE != 0].tolist()}:
                text = texts[row].as_py()
                left[row] |= self._normalize is not None and self._normalize(text) != text
        return left if left.any() else None

    def _by_tiktoken(self, texts: pa.Array) -> tuple[Tokens, Ints]:
        joined = _join(_with_prefix_space(texts) if self._has_prefix_space else texts)
        codes = codes_of(joined)
        return self._encode(texts, joined, codes, self._characters.look_up(codes))

    def _encode(self, texts: pa.Array, joined: str, codes: Codes, known: NDArray[np.uint8]) -> tuple[Tokens, Ints]:
        """The ids of texts that tiktoken encodes, from the text that they make together."""
        if not len(texts):
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        if self._spaces is not None:
            joined = self._spaces.mark(joined, codes, known, tuple(self._added.plain))
        try:
            ranks = self._encoding.encode_to_numpy(joined, allowed_special=self._allowed, disallowed_special=())
        except ValueError:  # more spaces in a row than a pattern with a lookahead can step back over
            return self._by_library(texts)
        if self._spaces is not None:
            ranks = ranks[ranks != ord(_MARK)]  # single bytes are their own ranks
        ends = np.flatnonzero(ranks == self._separator)
        lengths = np.diff(np.concatenate([[-1], ends, [len(ranks)]])) - 1
        return self._ids[ranks[ranks != self._separator] if len(ends) else ranks], lengths

    def _by_library(self, texts: pa.Array) -> tuple[Tokens, Ints]:
        rows: Any = texts.to_pylist()
        lists = [np.array(ids, np.int32) for ids in library_ids(self.tokenizer, rows)]
        return np.concatenate([np.zeros(0, np.int32), *lists]), np.array([len(ids) for ids in lists], np.int64)


def library_ids(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text by the `tokenizers` library, in this thread.

    A batch of several texts would be spread over a pool with a thread for each core, whose CPU time nobody counts.
    """
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # skips offsets
    return (encode([text], add_special_tokens=False)[0].ids for text in texts)


def _check_tiktoken() -> None:
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise NotByteLevel("needs tiktoken, which is not installed") from None
    found = tiktoken.__version__
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < LEAST_TIKTOKEN:
        raise NotByteLevel(f"needs tiktoken {'.'.join(map(str, LEAST_TIKTOKEN))} or newer, and {found} is installed")


_NOT_AS_READ = "is not written as its library writes it"
_OPTIONS = {
    "Split": ("pattern", "behavior", "invert"),
    "ByteLevel": ("add_prefix_space", "trim_offsets"),
    "Digits": ("individual_digits",),
}
"""What the library requires of the parts of a pre-tokenizer."""


def _rules_as_read(data: bytes) -> Mapping[str, Any]:
    """The rules of a tokenizer.json that the library reads as they are written. Raises NotByteLevel for others, or what
    looking into them raises: older releases and other programs leave options out, or give ids that the library changes."""
    rules = orjson.loads(data)
    vocabulary, decoder = rules["model"]["vocab"], rules["decoder"]
    parts = _flat(rules["pre_tokenizer"], "pretokenizers")
    is_as_read = (
        rules["version"] == "1.0"
        and (decoder is None or decoder["type"] == "ByteLevel")
        and all(name in part for part in parts for name in _OPTIONS[part["type"]])
        and sorted(vocabulary.values()) == list(range(len(vocabulary)))
        and _have_their_ids(rules["added_tokens"], vocabulary)
    )
    if not is_as_read:
        raise NotByteLevel(_NOT_AS_READ)
    return rules


def _have_their_ids(added: Sequence[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """Whether added tokens have the ids that the library gives them, whatever the file says: that of the vocabulary, or the
    next one above it."""
    following = len(vocabulary)
    for each in added:
        if each["id"] != vocabulary.get(each["content"], following) or not each["content"]:
            return False
        following += each["content"] not in vocabulary
        if not all(isinstance(each[name], bool) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")):
            return False
    return len({each["content"] for each in added}) == len(added)


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise NotByteLevel(f"is not a BPE but {model.get('type')}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotByteLevel(f"is a BPE with {option}")


def _check_ends(rules: Mapping[str, Any] | None) -> None:
    """Raises NotByteLevel for a post-processor that may change the ids of a text even where it adds no special tokens."""
    for part in _flat(rules, "processors"):
        kind = part.get("type")
        if kind == "TemplateProcessing":
            texts = [next(iter(piece.values())).get("id") for piece in part["single"] if "Sequence" in piece]
            if texts != ["A"]:
                raise NotByteLevel("has a template that does not contain the text once")
        elif kind not in ("ByteLevel", "RobertaProcessing", "BertProcessing"):
            raise NotByteLevel(f"has the post-processor {kind}")


def _check_whole_words(left_out: Sequence[str], tokenizer: tokenizers.Tokenizer, splitting: Splitting) -> None:
    """A model with ignore_merges takes a word that is in the vocabulary as it is: tokens that no merge reaches matter unless
    no text has them as a word."""
    if splitting.has_prefix_space:
        raise NotByteLevel("ignores merges, and puts a space before the text")
    for token in left_out:
        try:
            text = (bytes_of_tokens([token])[0] or b"").decode()
        except UnicodeDecodeError:
            continue  # words are whole characters
        if tokenizer.pre_tokenizer is not None and len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1:
            raise NotByteLevel(f"has a word that no merge makes: {token!r}")


def _pair(merge: Any) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _join(texts: pa.Array) -> str:
    # pyarrow.compute can join texts too, but its import takes as long as encoding half a megabyte.
    data = text_data(texts)
    return _SEPARATOR.encode().join([data[begin:end] for begin, end in pairwise(text_offsets(texts).tolist())]).decode()


def _bytes_of(text: pa.Array) -> NDArray[np.uint8]:
    """The UTF-8 of a single text, without a copy."""
    return np.frombuffer(text[0].as_buffer(), np.uint8)


def _place_to_cut(data: NDArray[np.uint8], step: int) -> int | None:
    """The first place of a single space between ASCII letters; None if there is none."""
    for begin in range(0, len(data), step):
        part = data[begin : begin + step + 2]
        is_letter = ((part | 0x20) >= ord("a")) & ((part | 0x20) <= ord("z"))  # bytes above 127 are never in this range
        at = np.flatnonzero((part[1:-1] == ord(" ")) & is_letter[:-2] & is_letter[2:])
        if len(at):
            return begin + 1 + int(at[0])
    return None


def _contains(texts: pa.Array, token: str) -> Flags:
    import pyarrow.compute as pc

    return numbers_of(pc.match_substring(texts, token))


def _with_prefix_space(texts: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    space, nothing = (text_scalar(each, texts.type) for each in (" ", ""))
    is_as_it_is = pc.or_(pc.starts_with(texts, " "), pc.equal(texts, nothing))
    return pc.binary_join_element_wise(pc.if_else(is_as_it_is, nothing, space), texts, nothing)
