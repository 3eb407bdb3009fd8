"""The run of `attach` on a Ray cluster: a role of the cluster, as with `overlord serve --ray`, that goes on without rank 0.

Rank 0 starts the run and looks after it. When rank 0 is lost, the other ranks read on; when all of them are gone, the run
ends by itself. A launcher that starts the ranks again gets a new run at once, which takes the place of the old one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.errors import OverlordError
from overlord.runtime import liveness
from overlord.service.auth import Listen
from overlord.service.kept_run import ATTEND_S, KeptRun, ServeRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.runtime.ray.engine import Ray
    from overlord.service.run_options import RunOptions

_started = count()
_log = logging.getLogger(__name__)


class ClusterRun:
    """A run in the cluster of an engine, as rank 0 has it."""

    def __init__(
        self,
        engine: Ray,
        job: Job,
        *,
        options: RunOptions,
        token: str,
        advertise: str | None,
        trainer_nodes: Sequence[Sequence[str]],
        resume: Mapping[str, Any] | None,
        accept_changes: Collection[str] | bool,
    ) -> None:
        """Start the run and serve it: on loopback, unless clients on other machines know this one as `advertise`.
        `trainer_nodes` are the names of the node of each data-parallel group."""
        listen = Listen("127.0.0.1:0" if advertise is None else "0.0.0.0:0", token, advertise=advertise)
        request = ServeRequest(
            job=job,
            options=_absolute(options),
            listen=listen,
            leave_after_s=liveness.RANK_SILENT.after_s,
            resume=resume,
            accept_changes=accept_changes,
            make_engine=engine.make_again(),
            trainer_nodes=tuple(tuple(names) for names in trainer_nodes),
            waits_for_all=True,
            forgotten_after_s=liveness.RUN_LEFT.after_s,
        )
        self._cluster = engine.cluster
        self._closed = threading.Event()
        self._cluster.join()
        try:
            self._run = KeptRun.start_anew(_own_name(), request, f"process {os.getpid()} on {socket.gethostname()}")
            try:
                self.address = self._run.announcement().address
            except BaseException:
                self._run.close()
                raise
        except BaseException:
            self._cluster.leave()
            raise
        threading.Thread(target=self._attend, name="overlord-attend", daemon=True).start()

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """As `Loader.wait_for_leave`. True if the run has ended."""
        try:
            return self._run.wait_for_leave(ranks, timeout_s)
        except OverlordError as error:
            _log.warning("the run in the cluster is gone: %s", error)
            return True

    def close(self) -> None:
        """End the run."""
        self._closed.set()
        self._run.close()
        self._cluster.leave()

    def _attend(self) -> None:
        address = self.address
        while not self._closed.wait(ATTEND_S):
            with suppress(OverlordError):  # ranks that read get the reason
                now = self._run.attend() or address
                if now != address:
                    _log.warning("the machine of the run was lost: it is served at %s now, no longer at %s", now, address)
                    address = now


def _own_name() -> str:
    """The name of the next run of this process, the same when a launcher starts the process again."""
    where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT") or str(os.getpid())
    launched = socket.gethostname(), *where, os.environ.get("TORCHELASTIC_RUN_ID", ""), str(next(_started))
    return f"attach-{hashlib.sha256(repr(launched).encode()).hexdigest()[:12]}"


def _absolute(options: RunOptions) -> RunOptions:
    """The run's process may have another working directory, if its node lacks this one's."""
    profile = options.profile
    return options if profile in (None, "otel") else replace(options, profile=Path(profile).absolute())
