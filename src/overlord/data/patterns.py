"""File patterns: brace ranges and globs. Pure text, the same for local files and object stores."""

from __future__ import annotations

import re

from overlord.errors import SpecError

MOST_BRACES = 1_000_000
# A brace in brackets, `[{]`, stands for itself.
_BRACES = re.compile(r"(?<!\[)\{([^{}]*)\}(?!\])")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def expand_braces(pattern: str) -> list[str]:
    """`a-{000..002}.{x,y}` in the order a shell gives. Zeros in front of a bound set the width."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    rests = expand_braces(after)
    choices = _choices(match.group(1), pattern)
    if len(choices) * len(rests) > MOST_BRACES:
        raise SpecError(f"{pattern!r} stands for more than {MOST_BRACES:,} files; use a glob such as *")
    return [before + choice + rest for choice in choices for rest in rests]


def _choices(inside: str, pattern: str) -> list[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = match.groups()
        low, high = int(first), int(last)
        if abs(high - low) >= MOST_BRACES:
            raise SpecError(f"{pattern!r} stands for more than {MOST_BRACES:,} files; use a glob such as *")
        padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-")[0] == "0" for bound in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if low <= high else -1
        return [f"{n:0{width}d}" for n in range(low, high + step, step)]
    if "," in inside:
        return inside.split(",")
    raise SpecError(f"in {pattern!r}, {{{inside}}} must be a range {{000..099}} or a choice {{a,b}}")


def has_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def glob_regex(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay inside a folder and pass over names that begin with a dot; `**/` is any number of folders."""
    out, i = [], 0
    while i < len(pattern):
        at_start = i == 0 or pattern[i - 1] == "/"
        hidden = r"(?!\.)" if at_start else ""
        if at_start and pattern.startswith("**/", i):
            out.append(r"(?:(?!\.)[^/]+/)*")
            i += 3
        elif at_start and pattern[i:] == "**":
            out.append(r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+")
            i += 2
        elif pattern[i] == "*":
            out.append(hidden + "[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append(hidden + "[^/]")
            i += 1
        elif pattern[i] == "[" and (end := _set_end(pattern, i)) > 0:
            inside = re.sub(r"([\\^\[\]&~|])", r"\\\1", pattern[i + 1 : end])
            out.append(hidden + "[" + ("^/" + inside[1:] if inside[0] == "!" else inside) + "]")
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    return re.compile("".join(out) + r"\Z", re.DOTALL)


def _set_end(pattern: str, start: int) -> int:
    """Where the `]` is that closes the `[` at `start`; -1 when there is none in its folder. `[]]` and `[!]]` hold one."""
    first = start + 2 if pattern.startswith("!", start + 1) else start + 1
    slash = pattern.find("/", start)
    return pattern.find("]", first + 1, slash if slash >= 0 else len(pattern))
