"""Chat templates as `transformers` defines them, rendered by jinja2: conversations to text, and which of it has a loss.

A template is code from outside, so it runs in jinja2's sandbox and sees plain JSON values alone. It must be deterministic:
a template that asks for today's date gets the declared one, or an error.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from overlord.errors import DataError, OverlordError, SpecError

ChatLoss = Literal["generation", "turns", "all"]
Message = Mapping[str, Any]

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Mark the output of a generation block. They are noncharacters: no text of a message has them."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class LossSpan(NamedTuple):
    """Characters `start` to `end` of a text, and the weight of their tokens in the loss."""

    start: int
    end: int
    weight: float = 1.0


class Rendered(NamedTuple):
    text: str
    spans: list[LossSpan]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template with the variables that it sees beside the messages. The same conversation gives the same text."""

    text: str
    variables: Mapping[str, Any]
    """`bos_token`, `eos_token` and what else the template reads."""
    today: datetime.date | None = None
    """What `strftime_now` takes for today."""

    @property
    def has_markers(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt_only: bool = False, marked: bool = False
    ) -> str:
        """The text of a conversation; with `prompt_only`, also what begins the assistant's next turn. With `marked` the
        output of generation blocks stands between two marks."""
        import jinja2

        try:
            return _compile(self.text).render(
                {
                    **self.variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": prompt_only,
                    "strftime_now": self._strftime_now,
                    "mark_generation_": marked,
                }
            )
        except OverlordError:
            raise
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses this conversation: {error}") from error
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DataError(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from error

    def _strftime_now(self, form: str) -> str:
        if self.today is None:
            raise SpecError(
                "the chat template writes today's date, so the same run would give other tokens tomorrow: declare the date, "
                "as today=datetime.date(2026, 1, 31), or the variable that the template takes instead, as "
                "variables={'date_string': '31 Jan 2026'}"
            )
        return datetime.datetime.combine(self.today, datetime.time()).strftime(form)

    def with_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, loss: ChatLoss, weight: str | None
    ) -> Rendered:
        """The text, and the parts of it that have a loss, each with the weight of its message."""
        weights = [_weight_of(message, i, weight) for i, message in enumerate(messages) if message["role"] == "assistant"]
        if loss == "all":
            text = self.render(messages, tools)
            return Rendered(text, [LossSpan(0, len(text))])
        if loss == "turns":
            return self._by_turns(messages, tools, weights)
        text, spans = _find_marks(self.render(messages, tools, marked=True))
        if weight is not None and len(spans) != len(weights):
            raise DataError(
                f"the template marks {len(spans)} generations in a conversation of {len(weights)} assistant messages, so "
                f"which of them {weight!r} belongs to is not known; use loss='turns'"
            )
        return Rendered(
            text, [LossSpan(span.start, span.end, w) for span, w in zip(spans, weights, strict=True)] if weight else spans
        )

    def _by_turns(self, messages: Sequence[Message], tools: Sequence[Any] | None, weights: Sequence[float]) -> Rendered:
        """An assistant's turn is what the conversation up to it adds to the prompt for it."""
        text = self.render(messages, tools)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[LossSpan] = []
        for i, weight in zip(assistant, weights, strict=True):
            head = self.render(messages[:i], tools, prompt_only=True)
            turn = text if i == len(messages) - 1 else self.render(messages[: i + 1], tools)
            if not (text.startswith(turn) and turn.startswith(head)):
                raise DataError(
                    f"message {i} cannot be found in the rendered conversation: this chat template writes earlier turns "
                    "differently once others follow (it may drop their reasoning), so loss='turns' cannot tell which text "
                    "is whose; use a template with {% generation %} markers and loss='generation'"
                )
            end = len(turn.rstrip())  # the line break after a turn is the template's
            spans.append(LossSpan(len(head), max(end, len(head)), weight))
        return Rendered(text, spans)

    def after_prompt(self, prompt: Sequence[Message], answer: Sequence[Message], tools: Sequence[Any] | None) -> Rendered:
        """The text of a prompt with its answer. The loss is on all that the answer adds to the prompt."""
        head = self.render(prompt, tools, prompt_only=True)
        text = self.render([*prompt, *answer], tools)
        if not text.startswith(head):
            raise DataError(
                "the rendered prompt is not the beginning of the rendered conversation: this chat template writes the "
                "prompt differently once an answer follows, so where the answer begins is not known"
            )
        return Rendered(text, [LossSpan(len(head), max(len(text.rstrip()), len(head)))])


def _find_marks(marked: str) -> tuple[str, list[LossSpan]]:
    """The text without its marks, and the spans that they enclosed."""
    pieces = re.split(f"([{_BEGIN}{_END}])", marked)
    if pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
        raise DataError(
            "the marks of {% generation %} blocks are not in pairs: a block lies in another one, or a message has the "
            "noncharacter U+FDD0 or U+FDD1"
        )
    spans, at = [], 0
    for i, piece in enumerate(pieces[::2]):
        if i % 2:
            spans.append(LossSpan(at, at + len(piece)))
        at += len(piece)
    return "".join(pieces[::2]), spans


def _weight_of(message: Message, index: int, key: str | None) -> float:
    value = 1.0 if key is None else message.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise DataError(
            f"message {index}: {key!r} is the weight of its tokens in the loss, a number from 0 on; got {value!r}"
        )
    return float(value)


@lru_cache(maxsize=64)
def _compile(text: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise SpecError("chat templates need an extra: pip install 'overlord-dataloader[chat]'") from None

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            is_marked = jinja2.nodes.ContextReference()
            return jinja2.nodes.CallBlock(self.call_method("_mark", [is_marked]), [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}" if context.get("mark_generation_") else caller()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def find_template(
    encoding: Any, template: str | Path | None, variables: Mapping[str, Any] | None, today: datetime.date | None
) -> ChatTemplate:
    """The template that was given, or else the tokenizer's own, with the names of the tokenizer's special tokens.

    `template` is its text, or the path of a file with it. A tokenizer.json has its template and special tokens beside it, in
    chat_template.jinja and tokenizer_config.json.
    """
    own_text, special = _of_tokenizer(encoding)
    if isinstance(template, Path) or (isinstance(template, str) and "{" not in template):
        if not os.path.isfile(template):
            raise SpecError(
                f"template is the text of a chat template or the path of a file with one; there is no file {template}"
            )
        template = Path(template).read_text(encoding="utf-8")
    text = template if template is not None else own_text
    if text is None:
        raise SpecError(
            f"the tokenizer {_kind(encoding)} has no chat template: give one with template=, as its text or the path of a "
            "file, or use a tokenizer of transformers that has one"
        )
    found = ChatTemplate(text, {**special, **(variables or {})}, today)
    _compile(found.text)
    return found


def _of_tokenizer(encoding: Any) -> tuple[str | None, dict[str, Any]]:
    if isinstance(encoding, (str, Path)):
        return _beside(Path(encoding))
    own = getattr(encoding, "chat_template", None)
    if isinstance(own, Mapping):
        own = own.get("default")  # those for tools or RAG are chosen with template=
    special = getattr(encoding, "special_tokens_map", None)
    named = special if isinstance(special, Mapping) else {}
    return own if isinstance(own, str) else None, {name: str(value) for name, value in named.items() if name in _SPECIAL}


def _beside(tokenizer: Path) -> tuple[str | None, dict[str, Any]]:
    config_file, template_file = tokenizer.with_name("tokenizer_config.json"), tokenizer.with_name("chat_template.jinja")
    config: Any = {}
    if tokenizer.suffix == ".json" and config_file.is_file():
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SpecError(f"{config_file} is not JSON: {error}") from error
    own = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(own, list):  # several by name
        own = next((each.get("template") for each in own if each.get("name") == "default"), None)
    if tokenizer.suffix == ".json" and template_file.is_file():
        own = template_file.read_text(encoding="utf-8")
    special = {}
    for name in _SPECIAL:
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            special[name] = value
    return own if isinstance(own, str) else None, special


def _kind(encoding: Any) -> str:
    return repr(str(encoding)) if isinstance(encoding, (str, Path)) else type(encoding).__name__


def read_messages(value: Any, what: str) -> list[dict[str, Any]]:
    """A conversation as plain messages: from an Arrow value, or from its JSON text. Raises DataError."""
    is_text = isinstance(value, (str, bytes))
    if is_text:
        value = _from_json(value, what)
    if not isinstance(value, (list, tuple)) or not value:
        got = "an empty list" if isinstance(value, (list, tuple)) else "null" if value is None else type(value).__name__
        raise DataError(f"{what} must be a list of messages, [{{'role': ..., 'content': ...}}, ...]; got {got}")
    return [_message(message, f"{what}[{i}]", is_text) for i, message in enumerate(value)]


def _message(message: Any, what: str, is_text: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} must be a message, {{'role': ..., 'content': ...}}; got {type(message).__name__}")
    # Arrow gives every struct the keys of all others, with null. In JSON text, a null inside a message was meant.
    made = {k: v if is_text else without_nulls(v) for k, v in message.items() if v is not None}
    if not isinstance(made.get("role"), str):
        raise DataError(f"{what} has no role: a message is {{'role': ..., 'content': ...}}; it has {sorted(made)}")
    reasoning = next((made[name] for name in _REASONING if name in made), None)
    return made if reasoning is None else {"thinking": reasoning, **made, "reasoning_content": reasoning}


def read_tools(value: Any, what: str) -> list[Any] | None:
    """The tools of a conversation: JSON schemas, as an Arrow value or as JSON text; None where there are none."""
    is_text = isinstance(value, (str, bytes))
    value = _from_json(value, what) if is_text and value else value
    if value is None or len(value) == 0:
        return None
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{what} must be a list of tools, each a JSON schema; got {type(value).__name__}")
    tools = [_from_json(tool, what) if isinstance(tool, str) else tool for tool in value]
    return tools if is_text else without_nulls(tools)


def without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value


def _from_json(text: str | bytes, what: str) -> Any:
    import orjson

    try:
        return orjson.loads(text)
    except ValueError as error:
        raise DataError(f"{what} is text, but not the JSON of a list: {error}") from error
