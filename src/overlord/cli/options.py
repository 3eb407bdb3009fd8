"""How verbs declare their options, each once: types for numbers and sizes, the flags of several verbs, and dataclasses whose
fields are flags."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from argparse import _ActionsContainer
    from collections.abc import Callable

    from _typeshed import DataclassInstance

    from overlord.jobfile.loading import JobFile

Options = TypeVar("Options", bound="DataclassInstance")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_job_argument(parser: ArgumentParser, *, nargs: Literal["?"] | None = None, help: str = "") -> None:
    """The job file, and the words that change what it declares."""
    parser.add_argument("job", type=job_file, nargs=nargs, help=help or JOB_HELP)
    add_overrides(parser)


def add_overrides(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="FIELD=VALUE",
        help="change what the job declares, as mesh.dp=8 or batch.tokens=1M",
    )


JOB_HELP = "the job: a Python file with `job = overlord.Job(...)`, or a YAML file"


def job_file(text: str) -> JobFile:
    """An argparse type: a job file."""
    from overlord.jobfile.loading import JobFile  # here: verbs without a job run on machines that lack Arrow

    return JobFile(Path(text))


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`, which may end in k, M or G (powers of 1,024)."""

    def number(text: str) -> int:
        digits, factor = text, 1
        if text[-1:].lower() in _SUFFIXES:
            digits, factor = text[:-1], _SUFFIXES[text[-1].lower()]
        try:
            value = round(float(digits) * factor) if factor > 1 else int(digits)
        except (ValueError, OverflowError):
            raise ArgumentTypeError(
                f"must be a whole number of at least {least}, got {text!r}; it may end in k, M or G"
            ) from None
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def zero_or_more(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def num_bytes(text: str) -> int:
    """An argparse type: a size such as 8GiB, 512MiB, 1.5GB, or a number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        prefix = (found[2] or "").lower()
        value = int(float(found[1]) * (1024 if prefix.endswith("i") else 1000) ** _POWERS[prefix.removesuffix("i")])
        if value > 0:
            return value
    raise ArgumentTypeError(f"a size is a positive number with a unit, as 8GiB, 512MiB or 20GB, got {text!r}")


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


SHARED: dict[str, dict[str, Any]] = {
    "--dp": {"type": at_least(1), "metavar": "N"},
    "--cp": {"type": at_least(1), "metavar": "N"},
    "--pp": {"type": at_least(1), "metavar": "N"},
    "--tp": {"type": at_least(1), "metavar": "N"},
    "--drain": {"dest": "drain_s", "type": zero_or_more, "metavar": "S"},
    "--file": {"metavar": "FILE"},
    "--from-step": {"type": at_least(0), "metavar": "N"},
    "--layers": {"type": at_least(1), "metavar": "N"},
    "--log": {"metavar": "PLACE"},
    "--processes": {"metavar": "N"},
    "--profile": {
        "type": Path,
        "metavar": "FILE",
        "help": "write who did what when to FILE, for Perfetto or chrome://tracing: up to twice 64 MiB, the newest part; "
        "the word `otel` sends it to OpenTelemetry instead",
    },
    "--rank": {"type": at_least(0), "metavar": "R"},
    "--ray": {"nargs": "?", "const": "", "metavar": "ADDRESS"},
    "--resume": {"type": Path, "metavar": "FILE"},
    "--source": {"metavar": "NAME"},
    "--state": {"type": Path, "metavar": "FILE"},
    "--step": {"type": at_least(0), "metavar": "N"},
    "--steps": {"metavar": "N"},
    "--text": {"action": "store_true", "help": "also read the documents, and print the beginning of each"},
    "--token-file": {"type": Path, "metavar": "FILE"},
    "--write": {"type": Path, "metavar": "FILE"},
}
"""The flags of several verbs: what may be given is declared here, and each verb says what it does with it. A flag that is
not here belongs to one verb, or to one group of options that verbs add as a whole."""


def add_option(parser: _ActionsContainer, *flags: str, **own: Any) -> None:
    """Add a flag, by its first name as `SHARED` has it. Nothing that stands there can be declared again."""
    parser.add_argument(*flags, **SHARED.get(flags[0], {}), **own)


def option(flag: str, help: str, *, default: Any = None, **own: Any) -> Any:
    """A field of an options dataclass that a flag fills, as `add_option` takes it."""
    return field(default=default, metadata={"flag": flag, "given": {"help": help, "default": default, **own}})


def add_options(parser: ArgumentParser, kind: type[DataclassInstance]) -> None:
    """Add the flags of an options dataclass. Its other fields are set before `to_dataclass` reads the options."""
    for each in fields(kind):
        if "flag" in each.metadata:
            given = each.metadata["given"]
            named = {} if "dest" in SHARED.get(each.metadata["flag"], {}) else {"dest": each.name}
            add_option(parser, each.metadata["flag"], **named, **given)


def to_dataclass(options: Namespace, kind: type[Options]) -> Options:
    """An instance of the dataclass `kind`, each field taken from the option with the same name."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
