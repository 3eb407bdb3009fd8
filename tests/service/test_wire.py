"""Messages that are not what a peer of this release would send are refused as a whole, with an error of the right kind."""

import msgspec
import pytest

from overlord.service import wire
from overlord.service.run_api import ACTIONS, FeedbackRequest

CONTENTS = {"type": "contents", "step": 3, "loss_tokens": 7}
ARRAY = {"type": "array", "name": "tokens", "dtype": "<i4", "shape": [4], "region": 0, "offset": 0, "num_regions": 1}


@pytest.mark.strangers
@pytest.mark.parametrize("kind", [wire.Ticket, wire.Hello, FeedbackRequest])
def test_a_request_with_text_that_is_not_utf8_is_refused_like_any_other_damage(kind):
    data = b"\x81\xa3\xff\xfe\xfd\x01"  # a map whose key is no text
    with pytest.raises(msgspec.DecodeError, match="malformed: 'utf-8' codec can't decode"):
        wire.unpack(data, kind)


@pytest.mark.strangers
def test_an_answer_nested_without_end_is_refused_like_any_other_damage():
    data = b"\x82\xa4type\xa5value\xa5value\x81\xa1a" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(msgspec.DecodeError, match="malformed: maximum recursion depth"):
        ACTIONS["state_before"].unpack_reply(data)


@pytest.mark.strangers
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x07", b"\x81\xa4type\xa5other", b"\x81\xa3\xff\xfe\xfd\x01"])
@pytest.mark.parametrize("action", list(ACTIONS))
def test_a_value_that_is_no_answer_is_refused(action, data):
    with pytest.raises(msgspec.DecodeError):
        ACTIONS[action].unpack_reply(data)


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("action", "good", "bad"),
    [
        ("here", [None], [3]),
        ("leave", [None], [3]),
        ("take", [None, wire.NotReady("why"), wire.Moved("0" * 8, 1), wire.Elsewhere()], [3, {"type": "end"}, {}]),
        ("state_before", [{"step": 3}], [None, [1], {1: 2}]),
        ("load_state", [0, 7], [None, -1, 1.0, True, "1"]),
        ("doing", [[], ["reads"]], [None, "reads", [1]]),
        ("feedback", [[], ["late"]], [None, "late", [None]]),
        ("change_weights", [12], [None, -1, 1.5]),
        ("decisions", [[], [(1, "weights", {})]], [None, [(1, "weights")], [("1", "weights", {})], [3]]),
    ],
)
def test_an_action_is_answered_by_a_value_of_its_type_alone(action, good, bad):
    for value in good:
        assert ACTIONS[action].unpack_reply(wire.pack(wire.Value(value))) == value
    for value in bad:
        with pytest.raises(msgspec.ValidationError, match=r"\$\.value"):
            ACTIONS[action].unpack_reply(wire.pack(wire.Value(value)))


@pytest.mark.strangers
@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1]},
        {"region": -1},
        {"offset": -4},
        {"num_regions": 0},
        {"dtype": "<i4" * 3},
        {"shape": [1] * 33},
    ],
)
def test_an_array_that_no_service_would_announce_is_refused(change):
    good, bad = [*ARRAY.values()], [*{**ARRAY, **change}.values()]
    assert isinstance(wire.unpack_answer(msgspec.msgpack.encode({**CONTENTS, "microbatches": [[good]]})), wire.Contents)
    with pytest.raises(msgspec.ValidationError):
        wire.unpack_answer(msgspec.msgpack.encode({**CONTENTS, "microbatches": [[bad]]}))


@pytest.mark.strangers
@pytest.mark.parametrize("change", [{"start": -1}, {"generation": -1}, {"heartbeat_s": 0.0}, {"heartbeat_s": -1.0}])
def test_a_welcome_with_numbers_that_mean_nothing_is_refused(change):
    """A heartbeat of 0 would have the client do nothing else."""
    good = {"job": "j", "instance": "0" * 8, "address": None, "start": 0, "generation": 0, "heartbeat_s": 15.0}
    msgspec.convert(good, wire.Welcome)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **change}, wire.Welcome)
