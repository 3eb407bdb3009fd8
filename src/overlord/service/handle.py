"""`RunHandle`: what a person or a program does with a run that goes on, from its own process or from another one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from overlord.declare.arguments import seconds_or_none, seconds_to_wait, whole
from overlord.declare.mesh import Mesh
from overlord.declare.policies import Skip
from overlord.errors import SpecError
from overlord.messages import Decision, MeshChange, SkipChange, SourceChange, WeightChange, document_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from overlord.messages import DocumentIds, DocumentOrigin, State
    from overlord.service.run_api import RunApi
    from overlord.status import PlannerStatus, Report, RunMetrics, StepCount, StepSummary

_COUNT_S = 2.0  # how long one call waits for a count


class RunHandle:
    """A running job, as `client.run` has it, wherever the client is. Every call may be repeated. Over the network a call
    needs the token of the service, if it has one, and raises ServiceError where the service cannot be reached."""

    def __init__(self, run: Callable[[], RunApi]) -> None:
        self._api = run

    def metrics(self) -> RunMetrics:
        """Returns the run at this moment as plain values: sources, ranks, roles, storage and events."""
        return self._api().metrics()

    def status(self) -> PlannerStatus:
        """Returns how far the planner is, and the state of its log."""
        return self._api().status()

    def waits(self) -> list[str]:
        """Returns what the run is busy with, one line each: what a rank that waits now waits for."""
        return self._api().status_lines()

    def report(self, step: int | None = None) -> Report:
        """Returns how the run stood before a step; by default that of the slowest rank, at once."""
        return self._api().report(None if step is None else whole(step, "step"))

    def plan(self, step: int) -> StepSummary | None:
        """Returns the plan of a step in numbers; None when the run ends before it."""
        return self._api().plan_summary(whole(step, "step"))

    def locate(self, documents: DocumentIds) -> list[DocumentOrigin]:
        """Returns the source, file and row of documents: of a microbatch, or of (source, chunk, row) each as a microbatch
        names them. A chunk that is no longer in a buffer is read again."""
        return self._api().locate(document_ids(documents))

    def count_steps(self, timeout_s: float | None = None) -> StepCount:
        """Returns how many steps the run has, and what they hold of each source. All of its data is read once for that,
        beside the run; after `timeout_s` returns how far the count is. It goes on, and a later call returns more."""
        limit_s = seconds_or_none(timeout_s, "timeout_s")
        until = None if limit_s is None else time.monotonic() + limit_s
        wait_s = 0.0
        while True:
            count = self._api().count_steps(wait_s)
            left_s = _COUNT_S if until is None else until - time.monotonic()
            if count.steps is not None or count.endless or left_s <= 0:
                return count
            wait_s = min(_COUNT_S, left_s)

    def resize(self, mesh: Mesh, *, at: int | None = None, timeout_s: float = 0.0, name: str | None = None) -> int:
        """Continue the run for another mesh; returns the first step of it. See `Loader.resize`. Calls with one `name` are
        one change, so that several trainers may ask for the same."""
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
            raise SpecError(f"resize takes an overlord.Mesh, got {mesh!r}")
        at = None if at is None else whole(at, "at")
        # One id for all attempts: a reply that was lost must not make it two changes.
        name = name or uuid4().hex
        return self._api().change_mesh(MeshChange(mesh, at, seconds_to_wait(timeout_s, "timeout_s"), name))

    def set_weights(self, weights: Mapping[str, float] | None, *, from_step: int | None = None) -> int:
        """Draw by other weights from a step on; returns that step. See `Loader.set_weights`."""
        from_step = None if from_step is None else whole(from_step, "from_step")
        return self._api().change_weights(WeightChange(weights, from_step, uuid4().hex))

    def skip(
        self,
        source: str,
        file: str | Path | None = None,
        rows: Sequence[int] | None = None,
        *,
        from_step: int | None = None,
    ) -> int:
        """Leave out rows of a file, a file or a whole source from a step on; returns that step. See `Loader.skip`."""
        return self._api().leave_out(skip_change(source, file, rows, from_step))

    def add_source(self, name: str, share: float, *, from_step: int | None = None) -> int:
        """Draw from a source that the run's job file declares by now; returns the first step that does. The service reads
        the file again, because nothing but plain values travels over the wire. See `Loader.add_source`."""
        from_step = None if from_step is None else whole(from_step, "from_step")
        return self._api().add_declared_source(SourceChange(name, share, from_step, uuid4().hex))

    def remove_source(self, name: str, *, from_step: int | None = None) -> int:
        """Draw no more from a source from a step on; returns that step. See `Loader.remove_source`."""
        return self.skip(name, from_step=from_step)

    def decisions(self) -> list[Decision]:
        """Returns what was decided while the run ran. See `Loader.decisions`."""
        return list(self._api().decisions())

    def checkpoint(self) -> State:
        """Returns the state before the first step that not every reading rank has taken, for `resume=`."""
        return self._api().state_dict()

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Hand out no new step, for good. A step that one rank has is still handed to the others, for up to `timeout_s`;
        False when some rank did not come for it. `checkpoint` then returns the state to go on from."""
        return self._api().drain(seconds_to_wait(timeout_s, "timeout_s"))


def skip_change(source: str, file: str | Path | None, rows: Sequence[int] | None, from_step: int | None) -> SkipChange:
    """A request to leave something out, checked as far as that is possible without the files of the source."""
    asked = Skip(source, None if file is None else str(file), rows)
    from_step = None if from_step is None else whole(from_step, "from_step")
    rows = None if asked.rows is None else tuple(asked.rows)
    return SkipChange(source, asked.file, rows, from_step, uuid4().hex)
