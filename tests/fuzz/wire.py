"""What a hostile or damaged peer sends: requests to a real service, and answers to a real client, over loopback.

A request is answered as a step or a value, or refused; what a client makes of an answer is compared with a decoder that is
written here from the description of the messages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

import overlord as ol
from overlord.batches.buffers import Arenas
from overlord.batches.collate import collate
from overlord.errors import OverlordError, ServiceError
from overlord.messages import Delivery, Later
from overlord.service import run_api, wire
from overlord.service.channel import FlightChannel
from overlord.service.flight_steps import SCHEMA, pack_step
from tests.batches.microbatches import microbatch
from tests.fuzz.mutations import damaged, edited
from tests.fuzz.states import JOBS
from tests.fuzz.targets import Answer, Case, OracleFailed, Seed, Wrong
from tests.service.served import Raw

_JOB = JOBS["samples"]
_SESSION = "0123456789abcdef"
_INSTANCE = "fedcba9876543210"
"""Stands for the instance of a service, which is drawn when it starts."""
_MOST_WAIT_S = 0.2
_TIMEOUT_S = 2.0
_BY_SOURCE = {"a": 1.5, "b": 2.0}


def _requests(job: str, state: dict[str, Any]) -> dict[str, bytes]:
    """One of each kind of request, as a client sends it."""
    made = {
        "ticket": wire.Ticket(job, 0, 1, 0.0, _SESSION, _INSTANCE, 0),
        "hello": wire.Hello(wire.VERSION, 0),
        "here": wire.Presence(job, 0, _SESSION),
        "leave": wire.Presence(job, 0, _SESSION),
        "state_before": run_api.StateBeforeRequest(job, 0),
        "load_state": run_api.LoadStateRequest(job, state, 0),
        "doing": run_api.StatusRequest(job),
        "feedback": run_api.FeedbackRequest(job, 0, 0, 0, _BY_SOURCE, _BY_SOURCE, [0.5, 0.25]),
        "change_weights": run_api.ChangeWeightsRequest(job, _BY_SOURCE, None, _SESSION),
        "decisions": run_api.DecisionsRequest(job),
    }
    return {name: wire.pack(value) for name, value in made.items()}


def _delivery() -> Delivery:
    rng = np.random.default_rng(3)
    first: dict[str, Any] = {
        "tokens": rng.integers(0, 50_000, (2, 16), np.int32),
        "long": np.arange(4000) % 7,
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.float32),
        "images": [np.arange(12, dtype=np.uint8).reshape(2, 2, 3), np.zeros((1, 1, 3), np.uint8)],
        "text": pa.array(["a", None, "längere Texte"]),
        "raw": pa.array([b"x" * 20, b""], pa.binary_view()),
        "shapes": {"tokens": ((2, 16), "int32"), "images": [((2, 2, 3), "uint8")]},
        "source": "a",
        "scale": 0.5,
        "nothing": None,
    }
    lean = collate(*microbatch([3000, 0, 1200, 700], document_multiple=8))
    return Delivery(3, 77, (first, {"tokens": np.arange(7, dtype=np.int16)}, lean))


def _answers() -> dict[str, tuple[str, bytes, list[bytes]]]:
    """How a client asks, and what a service answers: metadata, and regions."""
    contents, batches = pack_step(_delivery(), Arenas(2))
    regions = [bytes(buffer) for batch in batches for buffer in batch.column(0).buffers()[2:] if buffer is not None]
    welcome = wire.Welcome("a job's id", _SESSION, None, 0, 0, None)
    failure = wire.Failure("DataError", "a row is bad", ["in step 3"])
    state = {"overlord": 1, "step": 3}
    return {
        "contents": ("fetch", wire.pack(contents), regions),
        "not-ready": ("fetch", wire.pack(wire.NotReady("others are behind")), []),
        "end": ("fetch", wire.pack(wire.End()), []),
        "moved": ("fetch", wire.pack(wire.Moved(_SESSION, 1)), []),
        "failure": ("fetch", wire.pack(failure), []),
        "welcome": ("connect", wire.pack(wire.Value(welcome)), []),
        "state": ("state_before", wire.pack(wire.Value(state)), []),
        "loaded": ("load_state", wire.pack(wire.Value(1)), []),
        "value-failure": ("state_before", wire.pack(failure), []),
        "lines": ("doing", wire.pack(wire.Value(["reading a"])), []),
        "notes": ("feedback", wire.pack(wire.Value([])), []),
    }


class Wire:
    name = "wire"
    names_its_file = False

    @cached_property
    def seeds(self) -> list[Seed]:
        with _Run() as run:
            requests = [Seed(f"to-{name}", data) for name, data in run.requests.items()]
        answers = [
            Seed(f"from-{name}", msgspec.msgpack.encode({"meta": meta, "regions": regions}))
            for name, (_, meta, regions) in self._known_answers.items()
        ]
        # Requests come in more kinds; answers can be wrong in more ways.
        return [*requests, *answers, *[seed for seed in answers if seed.name == "from-contents"] * 6]

    @cached_property
    def _known_answers(self) -> dict[str, tuple[str, bytes, list[bytes]]]:
        return _answers()

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        if rng.random() < 0.02:
            return base.data
        if base.name.startswith("to-"):
            return _patient(_damaged_message(rng, base.data))
        sent = msgspec.msgpack.decode(base.data)
        meta, regions = sent["meta"], sent["regions"]
        if regions and rng.random() < 0.2:
            at = rng.randrange(len(regions))
            match rng.randrange(4):
                case 0:
                    del regions[at]
                case 1:
                    regions[at] = regions[at][: rng.randrange(len(regions[at]))]
                case 2:
                    regions.insert(at, b"")
                case 3:
                    regions[at] = damaged(rng, regions[at])
        else:
            meta = _damaged_message(rng, meta)
        if base.name == "from-welcome":
            meta = _at_home(meta)
        return msgspec.msgpack.encode({"meta": meta, "regions": regions})

    def read(self, case: Case, folder: Path) -> Answer:
        kind, _, name = case.base.name.partition("-")
        return self._asked(name, case.data) if kind == "to" else self._heard(name, case.data)

    def expected(self, case: Case) -> list[Answer]:
        kind, _, name = case.base.name.partition("-")
        if kind == "to":
            return _expected_step(case.base.data, case.data)
        return _expected_answer(self._known_answers[name][0], case.data)

    # A service and what it is asked

    def _asked(self, name: str, data: bytes) -> Answer:
        with _Run() as run:
            data = data.replace(_INSTANCE.encode(), run.instance.encode())
            try:
                answer = run.raw.get(data) if name == "ticket" else run.raw.act(name, data)
            except flight.FlightServerError as error:  # what a service refuses; other Flight errors are broken calls
                raise ServiceError(str(error)) from error
            except flight.FlightUnauthorizedError as error:
                raise ServiceError(str(error)) from error
            except OverlordError as error:
                raise _unexpected(name, error) from error
            if isinstance(answer, wire.Failure):
                raise _unexpected(name, answer.error())
            run.check_alive()
        if name != "ticket":
            return Answer(["answered"])
        return Answer([type(answer).__name__, answer.step if isinstance(answer, wire.Contents) else None])

    # A client and what it hears

    def _heard(self, name: str, data: bytes) -> Answer:
        sent = msgspec.msgpack.decode(data)
        how, _, _ = self._known_answers[name]
        self._peer.fetched = sent["meta"], sent["regions"]
        welcome = self._known_answers["welcome"][1]
        self._peer.acted = {"hello": sent["meta"] if how == "connect" else welcome, how: sent["meta"]}
        channel = FlightChannel(self._peer.address, 0, timeout_s=_TIMEOUT_S)
        try:
            return _ASKED[how](channel)
        finally:
            channel.close()

    @cached_property
    def _peer(self) -> _Peer:
        return _Peer()


def _expected_step(base: bytes, data: bytes) -> list[Answer]:
    """Anything that has the fields of a request, of their types, may be answered; nothing else may."""
    try:
        asked = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OracleFailed(str(error)) from error
    known = msgspec.msgpack.decode(base)
    if not isinstance(asked, dict) or not known.keys() - {"ahead", "needs_flight"} <= asked.keys() <= known.keys():
        raise OracleFailed("other fields")
    for name, value in asked.items():
        kinds = {type(known[name])} | ({int} if name in ("wait_s", "from_step") else set())
        is_left_out = value is None and name in ("weights", "from_step")
        least = -1 if name == "generation" else 0
        is_below = isinstance(value, (int, float)) and name != "version" and not value >= least
        if (type(value) not in kinds and not is_left_out) or is_below:
            raise OracleFailed(f"{name} is {value!r}")
    others = [Answer([kind, None]) for kind in ("NotReady", "End", "Moved", "Elsewhere")]
    return [Answer(["answered"]), Answer(["Contents", asked.get("step")]), *others]


def _unexpected(name: str, error: Exception) -> Exception:
    """What a service raised that is none of Overlord's own errors comes as a plain OverlordError that names its type."""
    if type(error) is not OverlordError:
        return error
    return Wrong(f"{name}: the service raised {str(error).partition(':')[0]}: {str(error)[:200]}")


def _fetch(channel: FlightChannel) -> Answer:
    got = channel.fetch(3, 0, 0.0)
    if isinstance(got, Delivery):
        return Answer(
            [got.step, _plain(got.loss_tokens), [{name: _plain(v) for name, v in m.items()} for m in got.microbatches]]
        )
    return Answer(["later" if isinstance(got, Later) else repr(got)])


def _connect(channel: FlightChannel) -> Answer:
    start, generation = channel.start(), channel.generation()
    if type(start) is not int or type(generation) is not int or start < 0:
        raise Wrong("a client that begins at something that is no step")
    return Answer([start])


def _state_before(channel: FlightChannel) -> Answer:
    state = channel.run.state_before(3)
    if not isinstance(state, dict):
        raise Wrong("a state that is no dict")
    return Answer([repr(state)])


def _load_state(channel: FlightChannel) -> Answer:
    generation = channel.run.load_state({"overlord": 1}, 0)
    return Answer([generation, type(channel._generations[-1]).__name__])


def _lines(lines: Any) -> Answer:
    if not _is_lines(lines):
        raise Wrong("lines of text that are something else")
    return Answer(lines)


def _doing(channel: FlightChannel) -> Answer:
    return _lines(channel.run.status_lines())


def _feedback(channel: FlightChannel) -> Answer:
    from overlord.messages import StepReport

    answer = _lines(channel.run.feedback(StepReport(0, 0, {"a": 1.0}, {"a": 2.0}, (0.5,)), 0))
    return Answer([line.partition(":")[0] for line in answer.rows])


_ASKED: dict[str, Callable[[FlightChannel], Answer]] = {
    "fetch": _fetch,
    "connect": _connect,
    "state_before": _state_before,
    "load_state": _load_state,
    "doing": _doing,
    "feedback": _feedback,
}


def _expected_answer(how: str, data: bytes) -> list[Answer]:
    sent = msgspec.msgpack.decode(data)
    try:
        said = msgspec.msgpack.decode(sent["meta"])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        said, fault = None, str(error)
    else:
        fault = "not an answer"
    # An explanation of a wait and a report must not fail for a service that answers nonsense.
    if how in ("doing", "feedback"):
        lines = said["value"] if said is not None and _is_value(said) and _is_lines(said["value"]) else []
        refused = [] if how == "doing" else ["the service did not take it"]
        return [Answer(lines if how == "doing" else [line.partition(":")[0] for line in lines]), Answer(refused)]
    if not isinstance(said, dict):
        raise OracleFailed(fault)
    try:
        if how == "fetch":
            return [_expected_fetch(said, sent["regions"])]
        if not _is_value(said):
            raise OracleFailed("not a value")
        value = said["value"]
        if how == "connect":
            return [Answer([value["start"]])]
        if how == "load_state":
            if type(value) is not int:
                raise OracleFailed("a generation is a number")
            return [Answer([generation, "int"]) for generation in (0, 1)]
        return [Answer([repr(value)])]
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, OSError, pa.ArrowException) as error:
        raise OracleFailed(str(error)) from error


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _is_value(said: Any) -> bool:
    return isinstance(said, dict) and said.get("type") == "value" and "value" in said


def _expected_fetch(said: dict[str, Any], regions: list[bytes]) -> Answer:
    match said["type"]:
        case "not_ready" | "moved" | "elsewhere":
            return Answer(["later"])
        case "end":
            return Answer(["None"])
        case "contents":
            micros = [_micro(fields, regions) for fields in said["microbatches"]]
            return Answer([said["step"], _plain(said["loss_tokens"]), micros])
    raise OracleFailed(said["type"])


_ATTRIBUTES = {
    "array": ("name", "dtype", "shape", "region", "offset", "num_regions"),
    "ragged": ("name", "arrays"),
    "column": ("name", "stream", "is_view", "is_chunked"),
    "shapes": ("name", "shapes", "ragged"),
    "scalar": ("name", "value"),
    "derived": ("name", "extra"),
}
"""Of each kind of field, in their order on the wire."""


def _named(field: list[Any]) -> dict[str, Any]:
    if not isinstance(field, list):
        raise OracleFailed("a field is a list")
    kind, *values = field
    return {"type": kind, **dict(zip(_ATTRIBUTES[kind], values, strict=False))}


def _micro(fields: list[list[Any]], regions: list[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    derived: dict[str, Any] = {}
    for field in map(_named, fields):
        name = field["name"]
        derived.pop(name, None)
        if field["type"] == "derived":
            extra = field.get("extra")
            found[name] = None
            derived[name] = None if extra is None else _array(_named(extra), regions)
        else:
            found[name] = _field(field, regions)
    return found | (_derived(found, derived) if derived else {})


def _derived(known: dict[str, Any], derived: dict[str, Any]) -> dict[str, Any]:
    """Place by place, from what a packed microbatch is."""

    def numbers(value: Any, dtype: str) -> list[int]:
        if value[0] != dtype or len(value[1]) != 1:
            raise OracleFailed("not a list of such numbers")
        return np.frombuffer(value[2], dtype).tolist()

    if not derived.keys() <= {"labels", "loss_mask", "position_ids"} or ("labels" in derived) != ("loss_mask" in derived):
        raise OracleFailed("nobody derives that")
    tokens, starts, lengths = (numbers(known[name], "<i4") for name in ("tokens", "document_starts", "document_lengths"))
    bounds = numbers(known.get("cu_seqlens_padded", known.get("cu_seqlens")), "<i4")
    documents = sorted((start, start + n) for start, n in zip(starts, lengths, strict=True) if n > 0)
    places = [place for begin, end in documents for place in (begin, end)]
    if places != sorted(places) or any(not 0 <= place <= len(tokens) for place in places):
        raise OracleFailed("documents overlap")
    if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] != len(tokens):
        raise OracleFailed("segments do not cover the places")
    found: dict[str, Any] = {}
    if "position_ids" in derived:
        positions = [place for begin, end in pairwise(bounds) for place in range(end - begin)]
        found["position_ids"] = "<i4", (len(tokens),), np.array(positions, "<i4").tobytes()
    if "labels" in derived:
        following = numbers(derived["labels"], "<i8")
        labels, mask = [*tokens[1:], -100][: len(tokens)], [False] * len(tokens)
        for (begin, end), label in zip(documents, following, strict=True):
            labels[end - 1] = label
            mask[begin:end] = [True] * (end - begin - 1) + [label >= 0]
        if derived["loss_mask"] is None:
            inside = {place for begin, end in documents for place in range(begin, end)}
            labels = [label if place in inside else -100 for place, label in enumerate(labels)]
        else:
            bits = numbers(derived["loss_mask"], "|u1")
            if len(bits) != -(-len(tokens) // 8):
                raise OracleFailed("not a bit for each place")
            mask = [bool(bits[place // 8] >> (7 - place % 8) & 1) for place in range(len(tokens))]
            labels = [label if is_set else -100 for label, is_set in zip(labels, mask, strict=True)]
        found["labels"] = "<i8", (len(tokens),), np.array(labels, "<i8").tobytes()
        found["loss_mask"] = "|b1", (len(tokens),), np.array(mask, "|b1").tobytes()
    return found


def _field(field: dict[str, Any], regions: list[bytes]) -> Any:
    match field["type"]:
        case "array":
            return _array(field, regions)
        case "ragged":
            return [_array(_named(array), regions) for array in field["arrays"]]
        case "column":
            stream = _array(_named(field["stream"]), regions)
            with pa.ipc.open_stream(pa.py_buffer(stream[2])) as reader:
                table = reader.read_all()
            table.validate(full=True)
            (values,) = [table.column(0)] if table.num_columns else [None]
            return repr(values.to_pylist()) if values is not None else None
        case "shapes":
            ragged = field["ragged"]
            listed = {k: [(tuple(shape), dtype) for shape, dtype in v] for k, v in field["shapes"].items()}
            return {k: v if k in ragged else v[0] for k, v in listed.items()}
        case "scalar":
            return _plain(field["value"])
    raise OracleFailed(field["type"])


def _array(array: dict[str, Any], regions: list[bytes]) -> tuple[str, tuple[int, ...], bytes]:
    dtype, shape = np.dtype(array["dtype"]), tuple(array["shape"])
    count = 1
    for side in shape:
        if type(side) is not int or side < 0:
            raise ValueError("a negative side")
        count *= side
    region, offset, num_regions = array["region"], array["offset"], array.get("num_regions", 1)
    if dtype.kind not in "biufc" or region < 0 or offset < 0 or num_regions < 1 or region + num_regions > len(regions):
        raise ValueError("out of bounds")
    content = b"".join(regions[region : region + num_regions])
    num_bytes = count * dtype.itemsize
    if offset + num_bytes > len(content):
        raise ValueError("out of bounds")
    if num_regions > 1 and (offset or num_bytes != len(content)):
        raise ValueError("an array of several regions is all of them")
    return dtype.str, shape, content[offset : offset + num_bytes]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        value.validate(full=True)
        return repr(value.to_pylist())
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) else value  # one that is no number equals nothing


def _damaged_message(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return damaged(rng, data)
    changed = edited(rng, msgspec.msgpack.decode(data))
    try:
        return msgspec.msgpack.encode(changed)
    except (OverflowError, ValueError, TypeError):  # numbers that MessagePack does not have
        return msgspec.msgpack.encode(json.loads(json.dumps(changed), parse_int=lambda digits: int(digits) % (1 << 63)))


def _patient(data: bytes) -> bytes:
    """A ticket may ask for a long wait and then gets it; that is no finding, and takes its time."""
    try:
        asked = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError):  # TypeError: a map as a key, with msgspec 0.19
        return data
    if isinstance(asked, dict) and isinstance(asked.get("wait_s"), (int, float)) and _MOST_WAIT_S < asked["wait_s"] <= 3600:
        return msgspec.msgpack.encode({**asked, "wait_s": _MOST_WAIT_S})
    return data


def _at_home(meta: bytes) -> bytes:
    """A welcome that sends the client elsewhere would have it look for a server there."""
    try:
        said = msgspec.msgpack.decode(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return meta
    if _is_value(said) and isinstance(said["value"], dict) and isinstance(said["value"].get("address"), str):
        said["value"]["address"] = None
        return msgspec.msgpack.encode(said)
    return meta


class _Run:
    """A run that is served, and a client that says whatever it is told to. Fresh for each case: some move the run."""

    def __enter__(self) -> _Run:
        self._stack = ExitStack()
        loader = self._stack.enter_context(ol.start(_JOB))
        self.raw = Raw(loader.serve())
        welcome = self.raw.hello()
        self.instance: str = welcome["instance"]
        self.requests = _requests(welcome["job"], loader.state_dict())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check_alive(self) -> None:
        """Whatever it was told, the service goes on to answer others."""
        self.raw.hello()


class _Peer(flight.FlightServerBase):
    """A service that answers whatever it was told to."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.address = f"grpc://127.0.0.1:{self.port}"
        self.fetched: tuple[bytes, list[bytes]] = b"", []
        self.acted: dict[str, bytes] = {}

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        meta, regions = self.fetched
        messages: Any = zip(_batches(regions), chain([meta], repeat(b"")), strict=False)  # batches with metadata
        return flight.GeneratorStream(SCHEMA, messages)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        return iter([self.acted.get(action.type, wire.pack(wire.Value(None)))])


def _batches(regions: list[bytes]) -> list[pa.RecordBatch]:
    """Each region in a buffer of its own, as a service sends them."""
    if not regions:
        return [pa.RecordBatch.from_arrays([pa.array([], pa.binary_view())], schema=SCHEMA)]
    from overlord.service.flight_steps import batch_of

    return [batch_of([np.frombuffer(region, np.uint8) for region in regions])]


TARGET = Wire()
