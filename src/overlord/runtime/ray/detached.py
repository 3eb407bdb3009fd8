"""Roles that outlive the process that spawned them: detached actors of Ray, found again by the namespace of their run.

An ordinary role ends with the process that spawned it. A detached role goes on until it is stopped, and Ray restarts it when
its process or its node is lost. Roles that it spawns are detached too: they go on while it is restarted, and it takes them
over.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from overlord.errors import ClosedError, SpecError, WaitTimeoutError
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.ray.names import Binding, HostedRole, Names, find_names
from overlord.runtime.ray.role_actor import HEALTH_CHECKS, RoleActor, own_release, working_folder
from overlord.runtime.ray.stored_calls import CallStore, JobTable
from overlord.runtime.ray.watch import HangWatch

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")
T = TypeVar("T")

_ROLE = "run"
_NUMBER = 1
_ACTOR = f"{_ROLE}#{_NUMBER}"  # the name of its actor
_CONCURRENCY = 64


def find_roles(names: Names) -> list[tuple[HostedRole, str, Any]]:
    """Every role of a namespace whose actor there is, in the order of spawning, with its actor's name and handle."""
    found: list[tuple[HostedRole, str, Any]] = []
    for key in names.table.keys("role/"):
        name = key.removeprefix("role/")
        with suppress(ValueError, ClosedError):  # its actor is gone, or it was unbound just now
            bound = names.find(name, refresh=True)
            listed = [role for role in names.listed_roles(bound.actor) if role.number == bound.number]
            found += [(replace(role, name=name), bound.actor, names.actor(bound.actor)) for role in listed]
    return sorted(found, key=lambda each: each[0].number)


def end_roles(namespace: str) -> None:
    """Kill every detached role of a namespace, and forget it."""
    named: Any = list_named_actors(all_namespaces=True)
    JobTable(namespace).clear()  # first: this process may be one of those that are killed
    for entry in named:
        if entry["namespace"] == namespace:
            with suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(entry["name"], namespace=namespace), no_restart=True)
    JobTable(namespace).clear()  # and what they wrote until then


class DetachedRole(Generic[R]):
    """The one detached role of a namespace. `call` retries while Ray restarts it."""

    def __init__(self, names: Names, actor: Any) -> None:
        self.names = names
        self._actor = actor
        self._watch: HangWatch | None = None

    def wait_until_started(self, timeout_s: float) -> None:
        """Wait until the role is made; raises what making it raised."""
        ref = self._actor.wait_until_made.remote(_NUMBER)
        if not ray.wait([ref], timeout=timeout_s)[0]:
            raise WaitTimeoutError(f"the run did not start within {timeout_s:.0f} s on the cluster; see Ray's logs for why")
        failed: Any = ray.get(ref)
        if failed is not None:
            raise failed.open()

    def call(self, method: Callable[..., T], /, *args: Any, timeout_s: float | None = None) -> T:
        return self.names.call(_ROLE, method, *args).result(timeout_s)

    def watch(self, hung_after_s: float) -> None:
        """Kill the role's process when it hangs, for as long as this process lives; Ray restarts it."""
        self._watch = HangWatch(lambda: {_ROLE: (_ACTOR, self._actor)}, hung_after_s, self.names.patience_s)

    def stop(self) -> None:
        """End the role, and everything that it has spawned."""
        self.leave()
        end_roles(self.names.namespace)
        end_roles(namespace_of_roles(self.names.namespace))

    def leave(self) -> None:
        """Let the role go on without this process."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def namespace_of_roles(namespace: str) -> str:
    """Where the roles are that a detached role spawns."""
    return f"{namespace}-roles"


def node_address() -> str:
    """The address of this process's node in its cluster."""
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)


def watch_detached(namespace: str, hung_after_s: float, patience_s: float) -> HangWatch:
    """Watch the detached role of a namespace from another process of the cluster, and kill its process when it hangs: the
    process that spawned it may be dead."""

    def find() -> dict[str, tuple[str, Any]]:
        try:
            return {_ROLE: (_ACTOR, ray.get_actor(_ACTOR, namespace=namespace))}
        except ValueError:  # it was stopped, and this process is about to be
            return {}

    return HangWatch(find, hung_after_s, patience_s)


def find_detached(namespace: str, patience_s: float) -> DetachedRole[Any] | None:
    """The detached role of a namespace of the cluster that this process is connected to; None if there is none."""
    try:
        return DetachedRole(find_names(namespace, patience_s), ray.get_actor(_ACTOR, namespace=namespace))
    except ValueError:  # there is no such actor
        return None


def spawn_detached(namespace: str, make: Callable[[Workplace], R], patience_s: float) -> DetachedRole[R]:
    """Start a detached role on this node. SpecError if the namespace has one already."""
    names = find_names(namespace, patience_s)
    end_roles(namespace_of_roles(namespace))  # what is left of a run that is gone
    names.table.clear()
    names.list_roles(_ACTOR, (HostedRole(_NUMBER, _ROLE, CallStore(names.table).store(make)),))
    options: Any = {"num_cpus": 0, "memory": 1, "max_concurrency": _CONCURRENCY, "max_restarts": -1}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    remote: Any = ray.remote
    try:
        actor = (
            remote(concurrency_groups={HEALTH_CHECKS: 1})(RoleActor)
            .options(name=_ACTOR, namespace=namespace, lifetime="detached", scheduling_strategy=here, **options)
            .remote(
                _ACTOR,
                namespace,
                patience_s,
                WorkplaceSize(),
                num_usable_cores(),
                release=own_release(),
                folder=working_folder(),
            )
        )
    except ValueError as error:  # another process was faster
        raise SpecError(f"the cluster runs {namespace!r} already: {error}") from error
    names.bind(_ROLE, Binding(_ACTOR, _NUMBER))
    return DetachedRole(names, actor)
