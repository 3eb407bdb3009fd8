"""The forms that a saved state has, and how it is known to be whole.

What `state_dict()` returns has the same three keys in every state, with text in one of them:

    {"overlord": 2, "step": 120, "state": "<JSON>"}

so that libraries which load in place, or take nested dicts apart and put them together again, can hold it: a dict whose keys
come and go, or an empty list in it, would not survive them. The text is JSON of the contents, which `checkpoint/state.py`
describes; `contents_of` returns them. The contents by themselves are accepted wherever a state is, and so is the JSON text
of either, also under the key "overlord" alone: {"overlord": "<JSON>"}, the form of
`overlord.integrations.torch.Stateful`.

The contents end with a checksum over all of them, as sorted JSON. The first release wrote contents without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from overlord.errors import StateError
from overlord.stream.plain import (
    DamagedError,
    short_repr,
    whole,
    with_keys,
)

if TYPE_CHECKING:
    from overlord.messages import State

VERSION = 2
VERSIONS = (1, 2)

_FORM = ("overlord", "step", "state")
_CONTENTS = ("overlord", "step", "unit", "fingerprint", "sources", "carried")


def seal(contents: Mapping[str, Any]) -> State:
    """Contents in the form that `state_dict()` returns. StateError for contents that can have no such form."""
    try:
        whole(contents.get("step"), "step")
    except DamagedError as error:
        raise damage_error(error) from None
    return {"overlord": contents["overlord"], "step": contents["step"], "state": _json(contents).decode()}


def with_checksum(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {**contents, "checksum": checksum(contents)}


def checksum(contents: Mapping[str, Any]) -> str:
    """Of all but the checksum. Neither the order of keys counts nor whether sequences are lists or tuples."""
    covered = {key: value for key, value in contents.items() if key != "checksum"}
    return hashlib.blake2b(_json(covered, is_sorted=True), digest_size=8).hexdigest()


def contents_of(state: Any) -> dict[str, Any]:
    """What a state holds: {"step": ..., "sources": ..., "fingerprint": ..., ...}, from whatever form it has.

    Raises StateError for what is no state. Whether the contents are whole is another question: see `check_whole`.
    """
    if isinstance(state, (str, bytes, bytearray)):
        state = _parse(state, "the state", "; to read a state from a file, give the text in it")
    if isinstance(state, Mapping) and len(state) == 1 and isinstance(state.get("overlord"), str):
        state = _parse(state["overlord"], "the text under the key 'overlord'", "; use an older checkpoint")
    if not isinstance(state, Mapping) or "overlord" not in state:
        raise StateError(
            "not an Overlord state: a dict with the key 'overlord' is needed, as state_dict() returns it, got "
            f"{short_repr(state) if state is None or isinstance(state, (str, int, float)) else type(state).__name__}"
        )
    _check_version(state["overlord"])
    if "state" not in state:
        return dict(state)
    try:
        with_keys(state, "the state", needed=_FORM)
        step = whole(state["step"], "step")
    except DamagedError as error:
        raise damage_error(error) from None
    if not isinstance(state["state"], str):
        raise damage_error(f"state must be text, it is {short_repr(state['state'])}")
    inside = _parse(state["state"], "the text under the key 'state'", "; use an older checkpoint")
    if not isinstance(inside, Mapping) or "state" in inside:
        raise damage_error("the text under the key 'state' is JSON of something else")
    for key, value in (("overlord", state["overlord"]), ("step", step)):
        if type(inside.get(key)) is not int or inside[key] != value:
            raise damage_error(f"{key} is {value}, and {short_repr(inside.get(key))} in the text under the key 'state'")
    return dict(inside)


def check_whole(contents: Mapping[str, Any], *, is_edited: bool = False) -> None:
    """Raise StateError unless contents have all their keys and the checksum that was saved with them. `is_edited` leaves
    the checksum out: they were changed by hand, and that is meant."""
    version = contents["overlord"]
    try:
        with_keys(contents, "the state", needed=(*_CONTENTS, *(("checksum",) if version > 1 else ())), allowed=("steered",))
    except DamagedError as error:
        raise damage_error(error) from None
    try:
        found = checksum(contents)
    except (TypeError, ValueError, RecursionError) as error:
        raise damage_error(f"it holds something else than numbers, text, lists and dicts: {error}") from None
    if version > 1 and contents["checksum"] != found and not is_edited:
        raise StateError(
            f"the state was edited or damaged after it was saved: its contents have the checksum {found}, and "
            f"{short_repr(contents['checksum'])} was saved with them. Use an older checkpoint; if it was edited on purpose, "
            "say so with accept_changes=['checksum']"
        )


def damage_error(reason: object) -> StateError:
    return StateError(f"the state is damaged: {reason}; use an older checkpoint")


def _check_version(version: Any) -> None:
    if type(version) is not int or version not in VERSIONS:
        raise StateError(f"the state has version {short_repr(version)}; this release reads versions 1 and {VERSION}")


def _parse(text: str | bytes | bytearray, what: str, way_out: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # orjson would make floats of large integers
        raise StateError(f"{what} is not JSON: {error}{way_out}") from None


def _json(contents: Mapping[str, Any], is_sorted: bool = False) -> bytes:
    option = orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_SORT_KEYS if is_sorted else 0)
    try:
        return orjson.dumps(contents, option=option)
    except TypeError:  # integers of more than 64 bits (a seed, say), or numbers of other classes
        plain = json.loads(json.dumps(contents))
    try:
        return orjson.dumps(plain, option=option)
    except TypeError:
        return json.dumps(plain, sort_keys=is_sorted, separators=(",", ":")).encode()
