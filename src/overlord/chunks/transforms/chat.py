"""Transforms for post-training: conversations, prompts with completions, and preference pairs, as tokens with a loss.

Each makes the columns `tokens` and `loss_mask` (or `loss_weights`), and a source that has one of them takes its loss from
these without being told. Rows are never cut: what is longer than the context is dropped and counted, or an error.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.chat_template import (
    ChatLoss,
    ChatTemplate,
    find_template,
    read_messages,
    read_tools,
)
from overlord.chunks.transforms.outcome import ORIGIN, row_error
from overlord.chunks.transforms.token_spans import encode_plain, encode_rendered, token_named
from overlord.chunks.transforms.tokenize import MOST_TOKENS
from overlord.declare.source import CHOSEN_TOKENS, MadeColumns
from overlord.errors import DataError, SchemaError, SpecError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from overlord.chunks.transforms.bpe import Tokens
    from overlord.chunks.transforms.tokenize import TokenizerLike

_MASK, _WEIGHTS = "loss_mask", "loss_weights"


class _Sequence(NamedTuple):
    """The tokens of one sequence, and the weight of each in the loss."""

    ids: Tokens
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations to tokens, by a chat template, with a loss on the assistant's turns.

    `messages` is a column of lists of {"role", "content", ...}, or of their JSON text; `tools` one of JSON schemas, or the
    tools of all conversations. `encoding` is as in `Tokenize`; a tokenizer of transformers brings its template along, and a
    tokenizer.json has it beside it. `template` is another one: its text, or the path of a file. `variables` are what it
    reads beside the messages (`enable_thinking`, `bos_token`), and `today` is the date for a template that writes one.

    The loss is on what the template's `{% generation %}` blocks enclose. With `loss="turns"` it is on what each assistant
    message adds to the prompt before it, for templates without such markers; with `loss="all"` on everything. `weight` is
    the key of a number in a message: its tokens count so much in the loss, and the source has `loss_weights`.
    """

    messages: str = "messages"
    into: str = "tokens"
    _: KW_ONLY
    encoding: TokenizerLike
    template: str | Path | None = None
    tools: str | Sequence[Mapping[str, Any]] | None = None
    loss: ChatLoss = "generation"
    weight: str | None = None
    variables: Mapping[str, Any] | None = None
    today: datetime.date | None = None
    keep: Sequence[str] = ()
    found: ChatTemplate = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_keep(self.keep, self.into)
        if self.loss not in ("generation", "turns", "all"):
            raise SpecError(f"loss is 'generation', 'turns' or 'all', got {self.loss!r}")
        if self.weight is not None and self.loss == "all":
            raise SpecError("weight= weighs the assistant's turns; it does not go with loss='all'")
        found = find_template(self.encoding, self.template, self.variables, self.today)
        object.__setattr__(self, "found", found)
        if self.loss == "generation" and not found.has_markers:
            raise SpecError(
                "the chat template has no {% generation %} markers, so it does not say which text the assistant writes: put "
                "{% generation %} and {% endgeneration %} around the assistant's messages in the template, or use "
                "loss='turns', which takes what each assistant message adds to the prompt before it"
            )

    @property
    def makes(self) -> MadeColumns:
        return MadeColumns(loss_mask=_MASK) if self.weight is None else MadeColumns(loss_weights=_WEIGHTS)

    def __call__(self, table: pa.Table) -> pa.Table:
        tools = self.tools if isinstance(self.tools, str) else None
        values = _values(table, self, (self.messages, *((tools,) if tools else ())), self.keep)
        rows = _each_row(table, values, self._row)
        return _to_table(table, self.into, rows, self.keep, weighted=self.weight is not None)

    def _row(self, messages: Any, tools: Any = None) -> _Sequence:
        conversation = read_messages(messages, f"{self.messages!r}")
        given = tools if isinstance(self.tools, str) else self.tools
        rendered = self.found.with_spans(conversation, read_tools(given, "tools"), self.loss, self.weight)
        made = _Sequence(*encode_rendered(self.encoding, rendered))
        return _with_loss(made, "the template marks no text of it as the assistant's: has it an assistant message?")


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Prompts with their completions to tokens, with a loss on the completion alone.

    Both columns hold texts, or both hold lists of messages (or their JSON text), which a chat template renders; the options
    are those of `Chat`. Texts are encoded each for itself, as a prompt is when the model is used, and nothing in them counts
    as a special token. `bos` is put before the prompt and `eos` after the completion, as in `Tokenize`; the loss is on `eos`
    too. A chat template writes both itself.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    into: str = "tokens"
    _: KW_ONLY
    encoding: TokenizerLike
    template: str | Path | None = None
    tools: str | Sequence[Mapping[str, Any]] | None = None
    bos: int | str | None = None
    eos: int | str | None = None
    variables: Mapping[str, Any] | None = None
    today: datetime.date | None = None
    keep: Sequence[str] = ()
    found: ChatTemplate | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_keep(self.keep, self.into)
        object.__setattr__(self, "found", _template_if_any(self))

    @property
    def makes(self) -> MadeColumns:
        return MadeColumns(loss_mask=_MASK)

    def __call__(self, table: pa.Table) -> pa.Table:
        tools = self.tools if isinstance(self.tools, str) else None
        names = (self.prompt, self.completion, *((tools,) if tools else ()))
        ends = _EndTokens.of(self)
        rows = _each_row(table, _values(table, self, names, self.keep), lambda *row: self._row(ends, *row))
        return _to_table(table, self.into, rows, self.keep)

    def _row(self, ends: _EndTokens, prompt: Any, completion: Any, tools: Any = None) -> _Sequence:
        if completion is None:
            raise DataError(f"the completion is missing: {self.completion!r} is null")
        answer = _Answer(self, ends, tools if isinstance(self.tools, str) else self.tools)
        return _with_loss(answer.after(prompt, completion, self.prompt, self.completion), "the completion is empty")


@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """Preference pairs for DPO and reward models: chosen and rejected of a row as one sample, which is never separated.

    `chosen` and `rejected` hold whole conversations, of which the last assistant turn has the loss; or, with the column
    `prompt`, answers to it: texts, or messages. The options are those of `PromptCompletion`. In a batch the two sides are
    documents of their own, side by side: `document_pairs` numbers the pairs of a microbatch and `document_chosen` says which
    side a document is. A pair may have `sequence_length` tokens, both sides together.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    into: str = "tokens"
    _: KW_ONLY
    encoding: TokenizerLike
    prompt: str | None = None
    template: str | Path | None = None
    tools: str | Sequence[Mapping[str, Any]] | None = None
    bos: int | str | None = None
    eos: int | str | None = None
    variables: Mapping[str, Any] | None = None
    today: datetime.date | None = None
    keep: Sequence[str] = ()
    found: ChatTemplate | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_keep(self.keep, self.into)
        object.__setattr__(self, "found", _template_if_any(self))
        if self.prompt is None and self.found is None:
            raise SpecError(
                "without prompt=, chosen and rejected are whole conversations, and need a chat template: give template=, or "
                "a tokenizer that has one; for texts, name the column of their prompts with prompt="
            )

    @property
    def makes(self) -> MadeColumns:
        return MadeColumns(loss_mask=_MASK, pairs=CHOSEN_TOKENS)

    def __call__(self, table: pa.Table) -> pa.Table:
        tools = self.tools if isinstance(self.tools, str) else None
        optional = [name for name in (self.prompt, tools) if name is not None]
        ends = _EndTokens.of(self)

        def pair(chosen: Any, rejected: Any, *others: Any) -> tuple[_Sequence, int]:
            given = dict(zip(optional, others, strict=True))
            prompt = None if self.prompt is None else given[self.prompt]
            answer = _Answer(self, ends, self.tools if tools is None else given[tools])
            sides = [
                self._side(answer, prompt, value, name) for value, name in ((chosen, self.chosen), (rejected, self.rejected))
            ]
            return _joined(*sides), len(sides[0].ids)

        values = _values(table, self, (self.chosen, self.rejected, *optional), self.keep)
        pairs = _each_row(table, values, pair)
        made = _to_table(table, self.into, [tokens for tokens, _ in pairs], self.keep)
        return made.append_column(CHOSEN_TOKENS, pa.array([count for _, count in pairs], pa.int64()))

    def _side(self, answer: _Answer, prompt: Any, value: Any, name: str) -> _Sequence:
        if value is None or len(value) == 0:
            raise DataError(f"the pair has no {name!r}: it is {'null' if value is None else 'empty'}")
        if self.prompt is None:
            messages = read_messages(value, repr(name))
            if messages[-1]["role"] != "assistant":
                raise DataError(f"{name!r} must end with an assistant message; it ends with one of {messages[-1]['role']!r}")
            made = answer.of_messages(messages[:-1], messages[-1:])
        else:
            made = answer.after(prompt, value, self.prompt, name)
        return _with_loss(made, f"the answer {name!r} is empty")


class _EndTokens(NamedTuple):
    bos: int | None
    eos: int | None

    @staticmethod
    def of(transform: PromptCompletion | PreferencePairs) -> _EndTokens:
        name = type(transform).__name__
        return _EndTokens(*(token_named(transform.encoding, end, getattr(transform, end), name) for end in ("bos", "eos")))


class _Answer(NamedTuple):
    """Encodes an answer after its prompt, with the loss on the answer."""

    declared: PromptCompletion | PreferencePairs
    ends: _EndTokens
    tools: Any

    def after(self, prompt: Any, answer: Any, prompt_name: str, name: str) -> _Sequence:
        is_text = [isinstance(value, str) and not _is_json_list(value) for value in (prompt, answer)]
        if prompt is None or is_text[0] != is_text[1]:
            kinds = ", ".join(f"{n!r} is {_kind(value)}" for n, value in ((prompt_name, prompt), (name, answer)))
            raise DataError(f"a prompt and its answer are both texts or both lists of messages: {kinds}")
        if not is_text[0]:
            return self.of_messages(read_messages(prompt, repr(prompt_name)), read_messages(answer, repr(name)))
        encoding, (bos, eos) = self.declared.encoding, self.ends
        before = [*([] if bos is None else [bos]), *encode_plain(encoding, prompt).tolist()]
        after = [*encode_plain(encoding, answer).tolist(), *([] if eos is None or not answer else [eos])]
        weights = np.repeat(np.array([0, 1], np.float32), [len(before), len(after)])
        return _Sequence(np.array([*before, *after], np.int32), weights)

    def of_messages(self, prompt: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]) -> _Sequence:
        template = self.declared.found
        if template is None:
            raise DataError(
                "the row has lists of messages, which need a chat template: give template=, or a tokenizer that has one"
            )
        rendered = template.after_prompt(prompt, answer, read_tools(self.tools, "tools"))
        return _Sequence(*encode_rendered(self.declared.encoding, rendered))


def _joined(chosen: _Sequence, rejected: _Sequence) -> _Sequence:
    """Both sides as one row. Nothing predicts the first token of the second."""
    weights = rejected.weights.copy()
    weights[:1] = 0
    return _Sequence(np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.weights, weights]))


def _template_if_any(transform: PromptCompletion | PreferencePairs) -> ChatTemplate | None:
    options = transform.encoding, transform.template, transform.variables, transform.today
    if transform.template is not None:
        return find_template(*options)
    try:
        return find_template(*options)
    except SpecError:  # texts need none; rows of messages say that they do
        return None


def _is_json_list(text: str) -> bool:
    return text.startswith('[{"') and text.endswith("}]")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "text" if isinstance(value, str) and not _is_json_list(value) else "a list of messages"


def _check_keep(keep: Sequence[str], into: str) -> None:
    if isinstance(keep, str):
        raise SpecError(f"keep is a sequence of column names: keep=({keep!r},)")
    taken = [name for name in keep if name in (into, _MASK, _WEIGHTS, CHOSEN_TOKENS)]
    if taken:
        raise SpecError(f"column {taken[0]!r} cannot be kept: the transform writes a column of that name")


def _values(table: pa.Table, transform: Any, names: Sequence[str], keep: Sequence[str]) -> list[list[Any]]:
    """The columns that a transform reads, as Python values."""
    present = [name for name in table.column_names if name != ORIGIN]
    missing = [name for name in (*names, *keep) if name not in present]
    if missing:
        raise SchemaError(
            f"{type(transform).__name__}: no column {', '.join(map(repr, missing))}; the columns are {present}"
        )
    return [table.column(name).to_pylist() for name in names]


def _each_row(table: pa.Table, columns: Sequence[Sequence[Any]], make: Callable[..., Any]) -> list[Any]:
    # A loop over rows: a template is rendered for one conversation at a time.
    made = []
    for row, values in enumerate(zip(*columns, strict=True)):
        try:
            made.append(make(*values))
        except SpecError:
            raise
        except DataError as error:
            raise row_error(table, row, error) from None
    return made


def _with_loss(made: _Sequence, otherwise: str) -> _Sequence:
    """The sequence, if some token after its first has a loss."""
    if not made.weights[1:].any():
        raise DataError(f"no token of this row has a loss: {otherwise}")
    return made


def _to_table(
    table: pa.Table, into: str, rows: Sequence[_Sequence], keep: Sequence[str], weighted: bool = False
) -> pa.Table:
    lengths = [len(row.ids) for row in rows]
    if sum(lengths) > MOST_TOKENS:
        raise DataError(f"a chunk of {sum(lengths):,} tokens is too large for one column; lower the source's window")
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    ids = np.concatenate([np.zeros(0, np.int32), *(row.ids for row in rows)])
    weights = np.concatenate([np.zeros(0, np.float32), *(row.weights for row in rows)])
    name, losses = (_WEIGHTS, weights) if weighted else (_MASK, (weights != 0).astype(np.int8))
    kept = {each: table.column(each) for each in (*keep, ORIGIN) if each in table.column_names}
    return pa.table(
        {
            into: pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
            name: pa.ListArray.from_arrays(offsets, pa.array(losses)),
            **kept,
        }
    )
