"""What ranks got, compared with an undisturbed run: nothing lost, repeated, reordered or changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import overlord as ol
from tests.faults.trainer import digest
from tests.faults.trainers import Taken


@dataclass(frozen=True, slots=True)
class Compared:
    """All counts are of (step, rank)."""

    num_steps: int
    num_taken: int
    num_taken_again: int
    """By a trainer that was started again; counted as one when it is compared."""
    num_missing: int
    num_out_of_order: int
    num_different: int
    first: str | None
    """The first difference, in words."""

    @property
    def is_same(self) -> bool:
        return self.num_missing == self.num_out_of_order == self.num_different == 0


def compared(job: ol.Job, lives: Sequence[Sequence[Sequence[Taken]]]) -> Compared:
    """`lives` are, for each rank, what each of its processes took, in order."""
    num_steps = max((taken.step + 1 for rank in lives for life in rank for taken in life), default=0)
    expected = undisturbed(job, num_steps)
    wrong: list[str] = []
    missing = out_of_order = different = taken_again = total = 0
    for rank, its_lives in enumerate(lives):
        seen: set[int] = set()
        for life in its_lives:
            for before, taken in zip([None, *life], life, strict=False):
                total += 1
                if before is not None and taken.step != before.step + 1:
                    out_of_order += 1
                    wrong.append(f"rank {rank} took step {taken.step} after {before.step}")
                if taken.digest != expected[taken.step][rank]:
                    different += 1
                    wrong.append(f"rank {rank} got another step {taken.step}")
                taken_again += taken.step in seen
                seen.add(taken.step)
        reached = max(seen, default=-1) + 1
        missing += reached - len(seen)
        wrong += [f"rank {rank} never got step {step}" for step in range(reached) if step not in seen]
    return Compared(num_steps, total, taken_again, missing, out_of_order, different, wrong[0] if wrong else None)


def undisturbed(job: ol.Job, num_steps: int) -> list[list[str]]:
    """For each step, what each rank gets in one process that nobody disturbs."""
    with ol.start(job) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(loader.tree.world_size)]
        return [[digest(next(client)) for client in clients] for _ in range(num_steps)]
