"""Proposes a job file for rows of a certain kind: tokens, text, images, conversations, completions or preference pairs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.sources.storage import has_glob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.jobfile.recognition import Recognised

_SEQUENCE_LENGTHS = (128, 8192)
_MOST_MEASURED = 1000  # conversations, whose lengths take a loop
_MESSAGE = 40  # characters that a template puts around a message, or fewer
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTES = "ByteTokenizer needs nothing installed: put your encoding there, a tiktoken name or a tokenizer.json"
_CHATML = "the template is ChatML: put your model's there, or leave it out where the encoding brings one along"


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """What is known of the documents of some rows."""

    column: str | None
    kind: str
    """tokens, text, images, or nothing of these."""
    p99: int
    """The length of which 99 of 100 are no longer, in tokens or characters; 0 where it is not known."""
    has_bad_rows: bool


def propose_job(found: Recognised, documents: DocumentKind, rows: pa.Table | None, encoding: str | None) -> str:
    """A YAML job file that reads these rows."""
    import yaml

    declared, notes = found.declaration(), list(found.notes)
    length = _sequence_length(documents.p99 + 1)
    batch: dict[str, Any] = {"sequence_length": length, "tokens": 8 * length}
    further = None if rows is None or documents.kind == "tokens" else _transform_of(rows, encoding)
    if further is not None:
        declared["transform"] = [further.transform]
        notes += further.notes
        length = _sequence_length(further.longest)
        batch = {"sequence_length": length, "tokens": 8 * length}
    elif documents.kind == "tokens":
        if documents.column not in (None, "tokens"):
            declared["tokens"] = documents.column
    elif documents.kind == "text":
        declared["transform"] = [{"Tokenize": {"column": documents.column, "encoding": encoding or "ByteTokenizer"}}]
        notes += [_BYTES] if encoding is None else []
    else:
        declared["tokens"] = None
        batch = {"sequence_length": 128, "samples": 8}
        if documents.column is not None:
            declared["decode"] = {"vision.DecodeImage": {"column": documents.column, "size": [224, 224]}}
    if documents.has_bad_rows:
        declared["on_bad_row"] = "skip"
    body = {"sources": {_source_name(found.paths): declared}, "batch": batch}
    is_flow = None if further is None or not further.has_template else False  # a template is written over several lines
    plain = yaml.dump(body, Dumper=_dumper(), sort_keys=False, default_flow_style=is_flow, width=100)
    return "".join(f"# {note}\n" for note in notes) + plain


def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines as one."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return Dumper


@dataclass(frozen=True, slots=True)
class _Further:
    """How rows become samples that train a model further."""

    transform: dict[str, Any]
    notes: list[str]
    longest: int
    """Characters of the longest sample."""
    has_template: bool


def _transform_of(rows: pa.Table, encoding: str | None) -> _Further | None:
    """The transform of rows that are preference pairs, prompts with completions, or conversations; None for others."""
    texts = {field.name for field in rows.schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)}
    chats = {field.name for field in rows.schema if _holds_messages(field.type)}
    options: dict[str, Any] = {"encoding": encoding or "ByteTokenizer"}
    notes = [_BYTES] if encoding is None else []
    if {"chosen", "rejected"} <= texts | chats and ("prompt" in texts | chats or "chosen" in chats):
        name, columns = "PreferencePairs", [each for each in ("prompt", "chosen", "rejected") if each in texts | chats]
        options |= {"prompt": "prompt"} if "prompt" in columns else {}
    elif {"prompt", "completion"} <= texts | chats:
        name, columns = "PromptCompletion", ["prompt", "completion"]
    elif chats & {"messages", "conversations", "conversation"}:
        name, columns = "Chat", [min(chats & {"messages", "conversations", "conversation"})]
        options = {"messages": columns[0]} | options if columns != ["messages"] else options
    else:
        return None
    has_template = bool(chats & set(columns))
    if has_template:
        options["template"] = _TEMPLATE
        notes.append(_CHATML)
    return _Further({name: options}, notes, _longest(rows.select(columns)), has_template)


def _holds_messages(type_: pa.DataType) -> bool:
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)):
        return False
    item = type_.value_type
    return pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}


def _longest(rows: pa.Table) -> int:
    def characters(value: Any) -> int:
        if isinstance(value, list):
            return sum(len(str((message or {}).get("content") or "")) + _MESSAGE for message in value)
        return len(value or "")

    lengths = [sum(map(characters, row.values())) for row in rows.slice(0, _MOST_MEASURED).to_pylist()]
    return max(lengths, default=0)


def _sequence_length(characters: int) -> int:
    return min(max(1 << max(characters - 1, 0).bit_length(), _SEQUENCE_LENGTHS[0]), _SEQUENCE_LENGTHS[1])


def _source_name(paths: str | Sequence[str]) -> str:
    pattern = paths if isinstance(paths, str) else os.path.dirname(paths[0])
    parts = [part for part in pattern.split("://")[-1].split("/") if part and not has_glob(part)]
    return (parts[-1].split(".")[0] if parts else "") or "data"
