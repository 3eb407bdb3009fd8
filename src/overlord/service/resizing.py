"""The step at which a mesh may change: one that no rank has taken, and that no rank is behind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from overlord.errors import SpecError, WaitTimeoutError
from overlord.service.constructor import ServingConstructor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.roles.data_constructor import HandedOut
    from overlord.runtime.engine import Handle, Reply

_PAUSE_S = 0.02


def freeze_at(
    at: int | None,
    constructors: Sequence[Handle[ServingConstructor]],
    readers: Callable[[], dict[int, int]],
    *,
    start: int,
    taken_to: int,
    timeout_s: float,
) -> int:
    """Freeze all constructors at step `at`, or at the first step that no rank has taken; wait for ranks that are behind it,
    and return it.

    `readers` returns the ranks that are known to read, with the next step of each, whether they have asked for it or not.
    Every step before `taken_to` is known to be taken; a constructor that was made again may not know it. `start` is the
    first step that can be handed out again.
    """
    found = _wait_all([constructor.call(ServingConstructor.freeze) for constructor in constructors])
    at_step = _next_steps(readers(), found)
    untaken = max([taken_to, *at_step.values(), *(handed.untaken for handed in found)])
    at = untaken if at is None else at
    if not start <= at <= untaken:
        raise SpecError(
            f"the mesh can change from step {start}, where this run began, to step {untaken}, the first that no rank has "
            f"taken; at={at} is not between them"
        )
    began = time.monotonic()
    while behind := {rank: step for rank, step in at_step.items() if step < at}:
        waited = time.monotonic() - began
        if waited >= timeout_s:
            listed = ", ".join(f"rank {rank} (at step {step})" for rank, step in sorted(behind.items()))
            raise WaitTimeoutError(
                f"the mesh cannot change at step {at} yet: {listed} did not take all steps before it in {waited:.1f} s; let "
                "them read on or close their clients, or give at=... to hand steps out again"
            )
        time.sleep(_PAUSE_S)
        found = _wait_all([constructor.call(ServingConstructor.thaw, at) for constructor in constructors])
        at_step = _next_steps(readers(), found)
    return at


def thaw_all(constructors: Sequence[Handle[ServingConstructor]]) -> None:
    """Hand out steps as before."""
    _wait_all([constructor.call(ServingConstructor.thaw) for constructor in constructors])


def _wait_all(calls: Sequence[Reply[HandedOut]]) -> list[HandedOut]:
    return [answer.result() for answer in calls]


def _next_steps(readers: dict[int, int], found: Sequence[HandedOut]) -> dict[int, int]:
    return readers | {rank: step for handed in found for rank, step in handed.next_of_rank.items()}
