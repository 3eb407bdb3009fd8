"""The evaluations of a run: for each a run of its own, started when it is first wanted, which every evaluation reads anew.

The process of the training run has them, whatever engine that run is on: they are short, and trainers wait for them anyway.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord.declare.mixture import Mixture
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.declare.job import Job
    from overlord.service.auth import Listen
    from overlord.service.loader import Loader


def eval_job(job: Job, name: str) -> Job:
    """The job of an evaluation, for the mesh and the strategy of the training run."""
    declared = job.evals[name]
    sources = declared.read_once()
    mixture = Mixture({source: 1.0 for source in sources}, stop="drop_exhausted")
    return replace(job, sources=sources, batch=declared.batch_for(job.batch), mixture=mixture, evals={}, skip=())


@dataclass(slots=True)
class _RunningEval:
    loader: Loader
    job: Job
    address: str | None = None


class Evaluations:
    """Runs evaluations for one training run. Thread-safe; every call may be repeated."""

    def __init__(self, start: Callable[[Job], Loader]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._running: dict[str, _RunningEval] = {}
        self._closed = False

    def loader(self, job: Job, name: str) -> Loader:
        """The run of an evaluation. After a resize of the training run it is another one, for the new mesh."""
        with self._lock:
            return self._find(job, name).loader

    def address(self, job: Job, name: str, listen: Listen) -> str:
        """The address at which it is served, as safely as the training run."""
        with self._lock:
            found = self._find(job, name)
            if found.address is None:
                tls = None if listen.tls is None else (listen.tls.certificate, listen.tls.key)
                # Any free port of the same interface.
                found.address = found.loader.serve(
                    f"{listen.bound.host}:0", token=listen.token, tls=tls, advertise=listen.advertise
                )
            return found.address

    def _find(self, job: Job, name: str) -> _RunningEval:
        if self._closed:
            raise SpecError(f"the run is closed, so evaluation {name!r} cannot be read")
        if name not in job.evals:
            known = ", ".join(map(repr, job.evals)) or "none: declare them with Job(evals={...})"
            raise SpecError(f"there is no evaluation {name!r}; the job has {known}")
        found = self._running.get(name)
        if found is not None and found.job.mesh != job.mesh:
            self._running.pop(name).loader.close()
            found = None
        if found is None:
            made = eval_job(job, name)
            found = self._running[name] = _RunningEval(self._start(made), made)
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running.values())
            self._running.clear()
        for each in running:
            each.loader.close()
