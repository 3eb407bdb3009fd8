"""This process's connection to a Ray cluster. Ray allows one per process, so the engines of several jobs share it: the first
engine connects, and the last one to leave shuts the cluster down if it was started here."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SYSTEM_CONFIG = {
    # Count objects that are read in place as used, not only those that Ray must not evict: see `Ray.store_use`.
    "scheduler_report_pinned_bytes_only": False,
    # Free steps soon after they were read: this takes less memory, and the memory is reused while it is in the CPU caches.
    "free_objects_period_milliseconds": 100,
    # Up to this size a result is faster inside the reply than through the object store (0.3 MB: 1.5 ms against 4 ms).
    "max_direct_call_object_size": 1 << 20,
    # A call to an actor that died fails after 0.1 to 0.2 s instead of 1 to 2 s, so that the retry comes sooner.
    "timeout_ms_task_wait_for_death_info": 100,
    "core_worker_internal_heartbeat_ms": 100,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Which cluster to use. `address` is that of `ray.init`; None starts a cluster on this machine.

    If the process is connected already, that connection is used, and is not closed. The other settings are for a cluster
    that `join` starts.
    """

    address: str | None = None
    num_cpus: int | None = None
    object_store_bytes: int | None = None
    runtime_env: Mapping[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        """Whether `join` starts it, so that it ends with this process."""
        return self.address is None and not ("ray" in sys.modules and _ray().is_initialized())

    def join(self) -> None:
        """Connect this process to the cluster, or share the connection that it has."""
        global _num_users, _is_ours
        with _lock:
            if self.address is None:
                _keep_to_this_machine()
            ray = _ray()
            if not ray.is_initialized():
                self._connect(ray)
                _is_ours = True
            elif self.address not in (None, "auto", ray.get_runtime_context().gcs_address):
                raise SpecError(
                    f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address} already and "
                    f"cannot use another at {self.address!r} too; call ray.shutdown() first, or leave the address out"
                )
            _num_users += 1

    def leave(self) -> None:
        """Shut the connection down if `join` opened it and no other engine uses it."""
        global _num_users, _is_ours
        with _lock:
            _num_users -= 1
            if _num_users == 0 and _is_ours:
                _is_ours = False
                _ray().shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"logging_level": "WARNING"}
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        if self.address is not None:
            try:
                _check_reachable(self.address)
                ray.init(address=self.address, **options)
            except ConnectionError as error:
                raise SpecError(
                    f"no Ray cluster answers at {self.address!r}: {error}; start one with `ray start --head`, or leave the "
                    "address out to run on this machine alone"
                ) from error
            return
        with _on_loopback(ray):
            self._start(ray, options)

    def _start(self, ray: Any, options: Mapping[str, Any]) -> None:
        ray.init(
            address="local",
            num_cpus=self.num_cpus,
            object_store_memory=self.object_store_bytes,
            include_dashboard=False,
            # Lets roles import the modules that this process can import. Ray searches the last path first.
            job_config=ray.job_config.JobConfig(code_search_path=[os.path.abspath(path) for path in reversed(sys.path)]),
            _system_config=dict(SYSTEM_CONFIG),  # a copy, because Ray adds keys
            **options,
        )


_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_CLUSTER_CONSTANT = "ENABLE_RAY_CLUSTER"  # set by Ray from the variable at import

_REACH_S = 5.0
_lock = threading.Lock()
_num_users = 0
_is_ours = False


def _keep_to_this_machine() -> None:
    """Make a one-machine cluster listen on loopback only, and send no usage statistics. Ray reads these variables at import;
    `_on_loopback` handles a process that imported ray earlier."""
    os.environ.setdefault(_CLUSTER_VARIABLE, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Makes a cluster that is started inside the block listen on loopback, unless the environment says otherwise. If ray was
    imported too early to read the variable, its constant is patched. SpecError if the cluster does not listen on loopback
    after all."""
    if os.environ.get(_CLUSTER_VARIABLE) != "0":  # the user wants the cluster to be reachable from elsewhere
        yield
        return
    constants = sys.modules.get("ray._private.ray_constants")
    before = getattr(constants, _CLUSTER_CONSTANT, False)
    if before:
        setattr(constants, _CLUSTER_CONSTANT, False)
    try:
        yield
    finally:
        if before:
            setattr(constants, _CLUSTER_CONSTANT, True)
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    if not ipaddress.ip_address(host.strip("[]")).is_loopback:
        ray.shutdown()
        raise SpecError(
            f"the Ray cluster that was started for this job listens on {host}, not on loopback, because ray was imported "
            f"before Overlord could set {_CLUSTER_VARIABLE}=0: set that in the environment of the program; or set it to 1 "
            "to let the cluster be reached from elsewhere; or start a cluster yourself and give its address to overlord.Ray"
        )


def _check_reachable(address: str) -> None:
    """ConnectionError if nothing listens at the address of a cluster: Ray itself would try again for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:  # of resolving the name too
        raise ConnectionError(error) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SpecError("the Ray engine needs ray: pip install 'overlord-dataloader[ray]'") from error
    return ray
