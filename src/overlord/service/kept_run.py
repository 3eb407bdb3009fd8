"""A served run that outlives the process that started it: `overlord serve --ray`, and `attach` on a cluster, keep the run in
a detached actor.

What it promises: the run, with its engine, its control loop over loaders and its front server, is a role of the cluster.
When the process that started it (its *driver*) is killed, nothing happens to the run. When the role's own process is killed,
or hangs, which the planner's process notices too, Ray starts it again; it takes over the run's roles, which have gone on
meanwhile, and serves at the same address. Where they do not make a whole run any more it starts those that are missing from
the plan log, and trainers reconnect. No step is lost or repeated.
`overlord serve` that is started again under the same name takes the run back; `attach` replaces it. A run that has no driver
and no trainer ends.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from overlord.errors import OverlordError, SpecError, WaitTimeoutError
from overlord.loaders.model import Partition
from overlord.planlog.plan_log import ClusterLog
from overlord.runtime import liveness
from overlord.service.auth import Address
from overlord.service.run import start, take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from overlord.declare.job import Job
    from overlord.messages import State
    from overlord.runtime.engine import Workplace
    from overlord.runtime.ray.detached import DetachedRole
    from overlord.runtime.ray.engine import Ray
    from overlord.service.auth import Listen
    from overlord.service.run_options import RunOptions

_log = logging.getLogger(__name__)

ATTEND_S = liveness.DRIVER_GONE.every_s
"""How often a driver tells its run that it lives."""
_SERVING, _PARTITION = "serving", "partition"
_START_S = 600.0  # sources may take long to list; errors come at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What a kept run is made from, also when it is made again."""

    job: Job
    options: RunOptions
    listen: Listen
    leave_after_s: float | None
    resize_on_leave: bool = False
    resume: Mapping[str, Any] | str | None
    metrics: Listen | None = None
    """Where metrics are served for Prometheus."""
    page: Listen | None = None
    """Where the live page is served."""
    make_engine: Callable[[], Ray] | None = None
    """Makes the engine in the run's process; None for one with default options."""
    trainer_nodes: tuple[tuple[str, ...], ...] = ()
    """The names of the node of each data-parallel group's trainers, where they are known before they connect."""
    waits_for_all: bool = False
    """Whether a rank that has never read holds the others back."""
    accept_changes: Collection[str] | bool = ()
    forgotten_after_s: float = liveness.RUN_FORGOTTEN.after_s
    """The run ends after so long without a driver and a reader."""
    hung_after_s: float = liveness.RUN_HUNG.after_s
    """The run's process, or one of its roles, is killed and started again when it answers no health check for so long."""
    digest: str = ""
    """Tells a driver whether a run that it finds is the one that it wants."""


class Announcement(NamedTuple):
    """Where a run is served."""

    address: str
    num_ranks: int
    step: int
    metrics: str | None = None
    page: str | None = None


class Attendance(NamedTuple):
    """Whether somebody looks after a run."""

    driver: str
    silent_s: float
    digest: str


def listen_again(listen: Listen, node_host: str, port: int | None = None) -> Listen:
    """Where a run that was lost listens when it is made again: at the same host and, if given, the port that it had. On a
    machine that does not have that host, because the run's own was lost, at `node_host`, which is the machine's own."""
    host = listen.bound.host
    port = listen.bound.port if port is None else port
    if _can_listen(host, 0):
        return replace(listen, address=_host_and_port(host, port))
    if not _can_listen(node_host, port):
        port = 0  # another program has it
    _log.warning(
        "the machine that had %s was lost, and the run is on %s now. Who knows the old address does not find it: listen on "
        "0.0.0.0, and give trainers a name that leads to wherever the run is (--advertise)",
        host,
        node_host,
    )
    return replace(listen, address=_host_and_port(node_host, port))


def _can_listen(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RunKeeper:
    """The role that has the run. See the module's docstring."""

    def __init__(self, request: ServeRequest, namespace: str) -> None:
        from overlord.runtime.ray.detached import end_roles, namespace_of_roles, node_address
        from overlord.runtime.ray.stored_calls import JobTable

        self._request = request
        self._namespace = namespace
        self._driver, self._attended_at = "", time.monotonic()
        table = JobTable(namespace)
        options, listen = request.options, request.listen
        if options.log is None:
            options = replace(options, log=ClusterLog(table))
        known = table.get(_SERVING)
        if known is not None:  # this role was lost: its trainers wait at the address that they know
            _log.warning("the process of the run was lost: the run goes on with its roles, or from its log")
            listen = listen_again(listen, node_address(), Address.parse(known.decode()).port)
            # As it was: while the CPUs of lost loaders do not count as free yet, a new partition would be smaller.
            saved = table.get(_PARTITION)
            partition = None if saved is None else msgspec.json.decode(saved, type=Partition)
            options = replace(options, partition=options.partition or partition)
        resume = request.resume if known is None else "log"
        roles = namespace_of_roles(namespace)
        loader = None
        if known is not None:
            try:
                loader = take_over(request.job, self._engine_in(roles, is_restart=True), options)
            except OverlordError as error:
                _log.warning("the roles of the run cannot be taken over, they are started again: %s", error)
        if loader is None:
            end_roles(roles)
            engine = self._engine_in(roles, is_restart=known is not None)
            changes = request.accept_changes
            loader = start(request.job, engine=engine, resume=resume, accept_changes=changes, **options.to_arguments())
        self._loader = loader
        try:
            self._address = listen.serve(
                self._loader.serve,
                leave_after_s=request.leave_after_s,
                wait_for_all=request.waits_for_all,
                resize_on_leave=request.resize_on_leave,
            )
            metrics, page = (
                each if each is None or known is None else listen_again(each, node_address())
                for each in (request.metrics, request.page)
            )
            self._metrics_url = None if metrics is None else metrics.serve(self._loader.serve_metrics)
            self._page_url = None if page is None else page.serve(self._loader.page)
            table.put(_PARTITION, msgspec.json.encode(self._loader.partition))
            table.put(_SERVING, self._address.encode())
        except BaseException:
            self._loader.close()
            raise
        self._ending = threading.Event()
        threading.Thread(target=self._end_when_forgotten, name="overlord-orphan", daemon=True).start()

    def _engine_in(self, namespace: str, *, is_restart: bool) -> Ray:
        from overlord.runtime.ray.engine import Ray

        make = self._request.make_engine or partial(Ray, "auto", hung_after_s=self._request.hung_after_s)
        engine = make()
        if self._request.trainer_nodes and not self._request.options.near:
            engine.expect_trainers(self._request.trainer_nodes)
        engine.keep_in(namespace, kept_by=self._namespace)
        if is_restart:
            engine.allow_lost_nodes()
        return engine

    def announcement(self) -> Announcement:
        num_ranks, step = self._loader.tree.world_size, self._loader.start_step
        return Announcement(self._address, num_ranks, step, self._metrics_url, self._page_url)

    def attendance(self) -> Attendance:
        return Attendance(self._driver, time.monotonic() - self._attended_at, self._request.digest)

    def attend(self, driver: str) -> str:
        """Note that a driver looks after the run. Returns the address at which it is served."""
        self._driver, self._attended_at = driver, time.monotonic()
        return self._address

    def drain(self, timeout_s: float) -> tuple[bool, State]:
        """Hand out no new step; returns whether every rank has the last one, and the state after it."""
        drained = self._loader.drain(timeout_s)
        return drained, self._loader.state_dict()

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """As `Loader.wait_for_leave`."""
        return self._loader.wait_for_leave(ranks, timeout_s)

    def status_lines(self) -> list[str]:
        return []

    def close(self) -> None:
        self._ending.set()
        self._loader.close()

    def _end_when_forgotten(self) -> None:
        """End the run when it has had neither a driver nor a reader for long."""
        from overlord.runtime.ray.detached import end_roles

        used_at = time.monotonic()
        while not self._ending.wait(ATTEND_S):
            now, used_at = time.monotonic(), max(used_at, self._attended_at)
            with suppress(OverlordError):  # nobody else would end the run
                used_at = now if now - used_at > ATTEND_S and self._loader.is_read() else used_at
            if now - used_at > self._request.forgotten_after_s:
                _log.warning("nobody has used this run for %.0f s: it ends", now - used_at)
                try:
                    self._loader.close()
                finally:
                    end_roles(self._namespace)  # this process is one of them
                return


def make_run_keeper(request: ServeRequest, namespace: str, _workplace: Workplace) -> RunKeeper:
    return RunKeeper(request, namespace)


class KeptRun:
    """A driver's view of a kept run, in the cluster that this process is connected to."""

    def __init__(self, role: DetachedRole[RunKeeper], driver: str, hung_after_s: float) -> None:
        self._role = role
        self._driver = driver
        role.watch(hung_after_s)

    @staticmethod
    def start_or_take_back(
        name: str, request: ServeRequest, driver: str, before_start: Callable[[], None]
    ) -> tuple[KeptRun, bool]:
        """Start a run under a name, or take back one that goes on without a driver; returns whether it was taken back.
        `before_start` is called before one is started. SpecError if the name belongs to another run."""
        from overlord.runtime.ray.detached import find_detached

        namespace = f"overlord-run-{name}"
        role: DetachedRole[RunKeeper] | None = find_detached(namespace, liveness.RAY_GONE.after_s)
        if role is None:
            before_start()
            return KeptRun._start(namespace, request, driver), False
        try:
            found = role.call(RunKeeper.attendance)
        except OverlordError:
            role.stop()  # it could not be made again, and nobody has seen why
            raise
        if found.digest != request.digest:
            raise SpecError(
                f"the cluster runs another job, or the same with other options, under the name {name!r}: stop it (repeat "
                "the command that started it, and interrupt that), or give this one another --name"
            )
        if found.driver and found.silent_s < liveness.DRIVER_GONE.after_s:
            raise SpecError(
                f"the cluster runs a job under the name {name!r} already, started by {found.driver}: stop that one, or give "
                "this one another --name"
            )
        return KeptRun(role, driver, request.hung_after_s), True

    @staticmethod
    def start_anew(name: str, request: ServeRequest, driver: str) -> KeptRun:
        """Start a run under a name, in place of one that a lost process may have left there."""
        from overlord.runtime.ray.detached import find_detached

        namespace = f"overlord-run-{name}"
        left = find_detached(namespace, liveness.RAY_GONE.after_s)
        if left is not None:
            left.stop()
        return KeptRun._start(namespace, request, driver)

    @staticmethod
    def _start(namespace: str, request: ServeRequest, driver: str) -> KeptRun:
        from overlord.runtime.ray.detached import spawn_detached

        role = spawn_detached(namespace, partial(make_run_keeper, request, namespace), liveness.RAY_GONE.after_s)
        try:
            role.wait_until_started(_START_S)
        except BaseException:
            role.stop()
            raise
        return KeptRun(role, driver, request.hung_after_s)

    def announcement(self) -> Announcement:
        self.attend()
        return self._role.call(RunKeeper.announcement)

    def attend(self) -> str | None:
        """Tell the run that its driver lives. Returns the address at which it is served; None while it is started again.
        Raises what ended the run."""
        try:
            return self._role.call(RunKeeper.attend, self._driver, timeout_s=ATTEND_S)
        except WaitTimeoutError:
            return None

    def drain(self, timeout_s: float) -> tuple[bool, State]:
        return self._role.call(RunKeeper.drain, timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        return self._role.call(RunKeeper.wait_for_leave, ranks, timeout_s)

    def close(self) -> None:
        """End the run."""
        with suppress(OverlordError):
            self._role.call(RunKeeper.close, timeout_s=liveness.ROLE_REPORT.after_s)
        self._role.stop()
