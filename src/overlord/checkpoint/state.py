"""The checkpoint: numbers and strings, a few kilobytes, the same on every rank, independent of the mesh.

    {"overlord": 2, "step": 120, "unit": "samples", "fingerprint": {...},
     "sources": {name: [chunk, row, samples, tokens, since, lead, weight, read_once]},
     "carried": {"names": [...], "sizes": [...], "rows": [[source, chunk, row, ...], ...]},
     "steered": {"decisions": [[step, name, value], ...], "heard": [...]},    where something was decided
     "checksum": "..."}

`checkpoint/form.py` has the form in which they are handed out. A state continues the job that wrote it under any mesh,
strategy, mixture, engine and number of loaders, and with sources added or removed. What would change the meaning of a cursor
is refused, and said. So is a state that was edited or damage_error, before anything is started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.checkpoint.fingerprint import accepted_names, refuse_differences
from overlord.checkpoint.form import (
    VERSION,
    check_whole,
    contents_of,
    damage_error,
    seal,
    with_checksum,
)
from overlord.steering.decisions import WEIGHTS, Steered, added_sources
from overlord.stream.plain import (
    DamagedError,
    as_mapping,
    text,
)
from overlord.stream.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from overlord.checkpoint.fingerprint import Fingerprint
    from overlord.declare.job import Job
    from overlord.messages import State


def to_state(progress: Progress, unit: str, fingerprint: Mapping[str, Any], steered: Steered | None = None) -> State:
    plain = progress.to_plain()
    contents = {
        "overlord": VERSION,
        "step": plain["step"],
        "unit": unit,
        "fingerprint": fingerprint,
        "sources": plain["sources"],
        "carried": plain["carried"],
    }
    if steered is not None and steered != Steered():
        contents["steered"] = steered.to_plain()
    return seal(with_checksum(contents))


def steered_of(state: Any) -> Steered:
    """What had been decided about the run that a state is of."""
    try:
        return _steered(contents_of(state))
    except DamagedError as error:
        raise damage_error(error) from None


def from_state(state: Any, job: Job, fingerprint: Fingerprint, accept_changes: Collection[str] | bool = ()) -> Progress:
    """The progress that a state holds, for this job. All of the state is checked.

    Raises StateError when the state is of another job, or damaged; `accept_changes` names the differences to take all the
    same (as the error lists them), or is True for all differences between jobs. That a state was edited is accepted only by
    name: 'checksum'.
    """
    contents = contents_of(state)
    check_whole(contents, is_edited="checksum" in accepted_names(accept_changes))
    try:
        text(contents["unit"], "unit", among=("samples", "tokens"))
        differences = fingerprint.differences(contents["fingerprint"])
        progress = _progress(contents, job.mix.unit)
        for name in added_sources(_steered(contents).decisions, progress.step):
            if name not in job.sources:
                differences[f"sources.{name}"] = (
                    f"source {name!r} was added while the run ran, and this job does not have it: declare it in "
                    "Job(sources=...), and leave the mixture as it is"
                )
        _check_names(contents["fingerprint"]["sources"], progress.names)
    except DamagedError as error:
        raise damage_error(error) from None
    refuse_differences(
        differences,
        accept_changes,
        "the state was saved by a job that differs from this one",
        "(a changed source then goes on from the same chunk and row numbers of its new data).",
    )
    return progress.for_sources(tuple(job.sources))


def _progress(state: Mapping[str, Any], unit: str) -> Progress:
    progress = Progress.from_plain(state)
    if state["unit"] == unit:
        return progress
    # What was drawn in samples says nothing about a balance in tokens.
    zeros = np.zeros(len(progress.names))
    return replace(progress, since=zeros.astype(np.int64), lead=zeros, weights=zeros)


def _steered(contents: Mapping[str, Any]) -> Steered:
    if "steered" not in contents:
        return Steered()
    steered = Steered.from_plain(contents["steered"])
    sources = as_mapping(contents["sources"], "sources")
    for i, decision in enumerate(steered.decisions):
        if decision.name == WEIGHTS:
            for name in decision.value["weights"] or ():
                text(name, f"steered.decisions[{i}][2].weights", among=tuple(sources))
    return steered


def _check_names(declared: Mapping[str, Any], names: Collection[str]) -> None:
    if set(declared) != set(names):
        one = next(iter(set(declared) ^ set(names)))
        raise DamagedError(f"source {one!r} is only in one of sources and fingerprint.sources")
