"""Agreeing on the step at which a mesh may change: one that no rank has taken, and that no rank is behind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from overlord.errors import SpecError, WaitTimeoutError
from overlord.roles.data_constructor import DataConstructor, HandedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.runtime.engine import Answer, Handle

C = TypeVar("C", bound=DataConstructor)

_PAUSE_S = 0.02


def agreed_step(
    constructors: Sequence[Handle[C]],
    waiting: Callable[[], dict[int, int]],
    start: int,
    taken_to: int,
    at: int | None,
    timeout_s: float,
) -> int:
    """Freeze all constructors at the first step that no rank has taken (or at `at`), and wait for ranks that are behind it.

    `waiting` gives the ranks that are known to read, with the step each takes next, whether they have asked yet or not.
    Every step before `taken_to` is known to be taken, also where a constructor was made anew and has not been asked yet.
    """
    found = _answers([constructor.ask(DataConstructor.freeze) for constructor in constructors])
    at_step = _joined(waiting(), found)
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
        found = _answers([constructor.ask(DataConstructor.thaw, at) for constructor in constructors])
        at_step = _joined(waiting(), found)
    return at


def thaw(constructors: Sequence[Handle[C]]) -> None:
    """Let steps be handed out as before."""
    _answers([constructor.ask(DataConstructor.thaw) for constructor in constructors])


def _answers(asked: Sequence[Answer[HandedOut]]) -> list[HandedOut]:
    return [answer.result() for answer in asked]


def _joined(waiting: dict[int, int], found: Sequence[HandedOut]) -> dict[int, int]:
    return waiting | {rank: step for handed in found for rank, step in handed.next_of_rank.items()}
