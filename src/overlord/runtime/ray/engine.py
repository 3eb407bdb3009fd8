"""The Ray engine. A role lives in a named actor that Ray restarts when it dies; the constructors of a node share as many as
it has cores. Roles of one node call each other over sockets and share memory; between nodes calls are actor calls, and
results come through the object store.

What it promises: roles start in parallel, and `wait_until_started` waits for them. A call goes to the role that its name is
bound to, and is retried when the role dies or the name is bound to another role. Actors are owned by the process that
spawned them: Ray kills them when that process ends, even if it crashes. With `keep_in` they go on, and another process takes
them over.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from overlord.errors import ClosedError, OverlordError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.runtime import liveness
from overlord.runtime.cores import choose_process, kind_of, processes_for
from overlord.runtime.engine import EarlyLoad, Handle, Workplace, WorkplaceSize
from overlord.runtime.ray.cluster import Cluster
from overlord.runtime.recorder import Recorder
from overlord.status import StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from overlord.runtime.ray.names import HostedRole, Names, RoleReply
    from overlord.runtime.ray.placement import RolePlacement
    from overlord.runtime.ray.stored_calls import CallStore, JobTable
    from overlord.runtime.ray.watch import HangWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """Resources and placement of each actor of a role.

    `placement`: "spread" distributes actors over the nodes, and constructors over those that have CPUs; "here" prefers the
    node of the process that calls `overlord.start`; "any" leaves the choice to Ray. The trainers' nodes come before it.
    `labels` are labels that the node must have.
    """

    num_cpus: float = 0
    memory_bytes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    placement: Literal["spread", "here", "any"] = "any"
    max_concurrency: int = 64
    """Calls that the actor runs concurrently; more are queued."""

    def __post_init__(self) -> None:
        if self.num_cpus < 0:
            raise SpecError(f"num_cpus cannot be negative, got {self.num_cpus}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise SpecError(f"memory_bytes must be positive, got {self.memory_bytes}")
        if self.placement not in ("spread", "here", "any"):
            raise SpecError(f"placement is spread, here or any, not {self.placement!r}")
        if self.max_concurrency < 2:
            raise SpecError(f"max_concurrency must be at least 2: a role answers while it waits, got {self.max_concurrency}")

    def to_ray(self) -> dict[str, Any]:
        """The arguments for `options` of a Ray actor, without the placement."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "max_concurrency": self.max_concurrency}
        # At least a byte: Ray ignores the placement of an actor that requests no resource at all.
        options["memory"] = self.memory_bytes or 1
        if self.resources:
            options["resources"] = dict(self.resources)
        if self.labels:
            options["label_selector"] = dict(self.labels)
        return options

    def __str__(self) -> str:
        requests = [f"num_cpus={self.num_cpus:g}"]
        if self.memory_bytes is not None:
            requests.append(f"memory={self.memory_bytes:,} bytes")
        requests += [f"{name}={amount:g}" for name, amount in self.resources.items()]
        requests += [f"node label {name}={value}" for name, value in self.labels.items()]
        return ", ".join(requests)


R = TypeVar("R")

_log = logging.getLogger("overlord.runtime.engine")
_CLOSE_S = liveness.RAY_CLOSING.after_s
_CONSTRUCTOR, _PLANNER = "constructor", "planner"

LOADERS = ActorOptions(num_cpus=1, placement="spread")
PLANNER = ActorOptions(placement="here", max_concurrency=256)
CONSTRUCTORS = ActorOptions(placement="spread")


@dataclass(slots=True, eq=False)
class _RoleHost:
    """An actor, and the roles that it has."""

    name: str
    actor: Any
    roles: dict[str, HostedRole]


class Ray:
    """The engine for a cluster.

    `address` None starts a cluster on this machine and stops it with the job; "auto", or a host and port, attaches to a
    running one. `loader_hosts` is the number of actors that loaders share, by default one for each share of a source but no
    more than the cluster has free CPUs for. The constructor of a data-parallel group is placed on the node of its trainers,
    or moved there when the first of them connects; until one is known, or where that node is not in the cluster, groups are
    spread over its nodes with CPUs. The groups of a node share up to as many processes as it has CPUs, or one process where
    it has two or fewer. `near` names the nodes (their addresses or Ray ids) by group where trainers cannot tell; the
    constructors then stay there. Callers wait `patience_s` for a role that died. A role that is alive and answers no health
    check for `hung_after_s` is killed and restarted; None disables this. A role answers health checks while it is busy. A
    loader host that died, and for which no node has room, goes on in the process of another one until a node has. `num_cpus`
    and `object_store_bytes` are for a cluster that is started here.
    """

    def __init__(  # noqa: PLR0913 - options of a cluster, keyword-only
        self,
        address: str | None = None,
        *,
        loader_hosts: int | None = None,
        loaders: ActorOptions = LOADERS,
        planner: ActorOptions = PLANNER,
        constructors: ActorOptions = CONSTRUCTORS,
        others: ActorOptions = PLANNER,
        near: Sequence[str] = (),
        patience_s: float = liveness.RAY_GONE.after_s,
        hung_after_s: float | None = liveness.RAY_HUNG.after_s,
        num_cpus: int | None = None,
        object_store_bytes: int | None = None,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        if loader_hosts is not None and loader_hosts < 1:
            raise SpecError(f"loader_hosts must be at least 1, got {loader_hosts}")
        if patience_s <= 0:
            raise SpecError(f"patience_s is a positive number of seconds, got {patience_s}")
        if hung_after_s is not None and hung_after_s <= 0:
            raise SpecError(f"hung_after_s is a positive number of seconds or None, got {hung_after_s}")
        self._again: Callable[[], Ray] = partial(
            Ray,
            "auto",
            loader_hosts=loader_hosts,
            loaders=loaders,
            planner=planner,
            constructors=constructors,
            others=others,
            near=tuple(near),
            patience_s=patience_s,
            hung_after_s=hung_after_s,
        )
        self._loader_hosts = loader_hosts
        # A role's name begins with its kind: planner, loaders/0, constructor/3, ...
        self._options = {"loaders": loaders, "planner": planner, _CONSTRUCTOR: constructors}
        self._others = others
        self._near = tuple(near)
        self._trainers: tuple[tuple[str, ...], ...] = ()
        self._patience_s = patience_s
        self._hung_after_s = hung_after_s
        self._watch: HangWatch | None = None
        self._cluster = Cluster(
            address=address, num_cpus=num_cpus, object_store_bytes=object_store_bytes, runtime_env=runtime_env
        )
        self._lock = threading.Lock()
        self._roles: dict[str, _RoleHost] = {}  # in the order of spawning
        self._shared: dict[str, list[_RoleHost]] = {}  # by node, the actors that its constructors share
        self._spare: list[tuple[str, str | None, _RoleHost]] = []  # actors without roles, with their kind and node
        self._guests: dict[str, _RoleHost] = {}  # roles in the actor of another, because there is no room for their own
        self._num_spawned = 0
        self._starting: dict[str, Any] = {}
        self._size: WorkplaceSize | None = None
        self._kept_in: str | None = None
        self._kept_by: str | None = None
        self._has_started = False
        self._names: Names
        self._placement: RolePlacement
        self._calls: CallStore
        self.recorder = Recorder()
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the names, because a handle inside an actor only makes calls."""
        return self._names.__reduce__()

    def open(self, size: WorkplaceSize, loads: Sequence[EarlyLoad] = ()) -> None:  # noqa: ARG002 - Ray forks nothing
        with self._lock:
            if self._size is not None:
                raise SpecError("this engine runs a job already; give each overlord.start its own")
            self._cluster.join()
            self._size = size
        # These modules import Ray, which must come after `join` has set its environment.
        from overlord.runtime.ray.names import find_names
        from overlord.runtime.ray.placement import RolePlacement
        from overlord.runtime.ray.stored_calls import CallStore
        from overlord.runtime.ray.watch import HangWatch

        self._names = find_names(self._kept_in or f"overlord-{uuid.uuid4().hex}", self._patience_s)
        self._calls = CallStore(self._names.table)
        if not self.roles_live_on:
            self._names.table.note_owner()
        self._placement = RolePlacement(self._near, self._trainers, known=self._near if self._has_started else ())
        if self._hung_after_s is not None:
            self._watch = HangWatch(self._running_roles, self._hung_after_s, self._patience_s, settle=self._settle)

    @property
    def cluster(self) -> Cluster:
        """The cluster that roles run in."""
        return self._cluster

    def make_again(self) -> Callable[[], Ray]:
        """What makes an engine with the same options in a process of the cluster. It can be pickled."""
        return self._again

    is_in_process = False
    shares_memory = True
    is_one_machine = False
    keeps_planner = False

    @property
    def roles_live_on(self) -> bool:
        return self._kept_in is not None

    def keep_in(self, namespace: str, *, kept_by: str | None = None) -> None:
        """Let roles outlive this process, in a namespace where another one finds them; called before `open`. `kept_by` is
        the namespace of the detached role that this process is: the planner's process watches it."""
        self._kept_in = namespace
        self._kept_by = kept_by

    def take_over(self) -> list[str]:
        """Take over the roles that a lost process has left in this engine's namespace; returns their names. A role whose
        actor is gone is left out."""
        from overlord.runtime.ray.detached import find_roles

        with self._lock:
            hosts: dict[str, _RoleHost] = {}
            for role, actor_name, actor in find_roles(self._names):
                host = hosts.setdefault(actor_name, _RoleHost(actor_name, actor, {}))
                host.roles[role.name] = role
                self._roles[role.name] = host
                self._num_spawned = max(self._num_spawned, role.number)
                if len(host.roles) > 1 and not role.name.startswith(_CONSTRUCTOR):
                    self._guests[role.name] = host
            for name, host in self._roles.items():
                home = self._names.node_of(host.name) if kind_of(name) == _CONSTRUCTOR else None
                if home is not None and host not in self._shared.setdefault(home, []):
                    self._shared[home].append(host)
            return list(self._roles)

    def empty(self, names: Collection[str]) -> None:
        """Stop roles that were taken over, and keep their actors for the next roles of their kind: a role that is made in a
        process that runs costs milliseconds, a process seconds."""
        import ray

        with self._lock:
            emptied: dict[Any, _RoleHost] = {}
            for name in names:
                host = self._roles.pop(name)
                self._names.unbind(name)
                emptied[host.actor.drop_role.remote(host.roles.pop(name).number)] = host
                self._names.list_roles(host.name, tuple(host.roles.values()))
                self._forget_shared(host)
        hung = ray.wait(list(emptied), num_returns=len(emptied), timeout=_CLOSE_S)[1] if emptied else []
        lost = {emptied[ref].name: emptied[ref] for ref in hung}
        _kill([host.actor for host in lost.values()])
        for host in {host.name: host for host in emptied.values() if host.name not in lost and not host.roles}.values():
            self._spare.append((kind_of(host.name).partition("#")[0], self._names.node_of(host.name), host))

    def allow_lost_nodes(self) -> None:
        """Use another node, with a warning, for one that `near` names and that is not there: the run has started before, and
        may have lost it. Called before `open`."""
        self._has_started = True

    @property
    def log_table(self) -> JobTable:
        return self._names.table

    def place_near(self, nodes: Sequence[str]) -> None:
        if self._size is not None:
            self._placement.place_near(nodes)
        self._near = tuple(nodes)

    @property
    def near(self) -> tuple[str, ...]:
        return self._near

    def expect_trainers(self, names: Sequence[Sequence[str]]) -> None:
        self._trainers = tuple(tuple(each) for each in names)

    @property
    def most_hosts(self) -> int | None:
        import ray

        each = self._options["loaders"].num_cpus or 1
        return max(int(ray.cluster_resources().get("CPU", 1) / each), self._loader_hosts or 1)

    @property
    def num_hosts(self) -> int | None:
        import ray

        if self._loader_hosts is not None:
            return self._loader_hosts
        each = self._options["loaders"].num_cpus or 1
        return max(int(ray.available_resources().get("CPU", 1) / each), 1)

    def spawn(self, name: str, make: Callable[[Workplace], R], *, apart_from: str = "") -> Handle[R]:
        from overlord.runtime.ray.names import Binding, HostedRole

        # Every loader host has an actor of its own: none is lost together with another, unless a node is.
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed; call overlord.start again")
            if name in self._roles:
                raise OverlordError(f"a role named {name!r} is already running")
            self._num_spawned += 1
            role = HostedRole(self._num_spawned, name, self._calls.store(make))
            node = self._node_apart(name, apart_from) or self._placement.node_of(name, self._options_of(name))
            host, self._starting[name] = self._start_role(role, node)
            self._roles[name] = host
            self._names.bind(name, Binding(host.name, role.number))
        return Handle(self, name)

    def _node_apart(self, name: str, other: str) -> str | None:
        """A node with room for a role that should not be lost together with another one; None where there is no choice."""
        from overlord.runtime.ray.placement import find_apart

        avoided = self._names.node_of(self._roles[other].name) if other in self._roles else None
        return None if avoided is None else find_apart(self._options_of(name), avoided)

    trainers_are_near = False

    def expect_groups(self, num_groups: int, *, are_light: bool) -> None:  # noqa: ARG002 - trainers may be anywhere
        self._placement.expect_groups(num_groups)

    def move_near(self, name: str, node_names: Sequence[str]) -> bool:
        node = None if self._near else self._placement.find(node_names)
        host = self._roles.get(name)
        if node is None or host is None or self._names.node_of(host.name) == node:
            return False
        is_moved = self._move(name, lambda role: self._start_role(role, node))
        if is_moved:
            self._placement.note_home(name, node)
        return is_moved

    def _move(self, name: str, start: Callable[[HostedRole], tuple[_RoleHost, Any]]) -> bool:
        """Make a role once more, where `start` does, and bind its name to that. False if another did so meanwhile."""
        from overlord.runtime.ray.names import Binding, HostedRole

        with self._lock:
            old_host = self._roles.get(name)
            if old_host is None:
                return False
            old = old_host.roles[name]
            self._num_spawned += 1
            role = HostedRole(self._num_spawned, name, old.make)
            host, started = start(role)
        try:
            # The old one answers until the new one is there.
            self._wait_for({name: started}, self._patience_s)
            with self._lock:
                is_same = self._roles.get(name) is old_host and old_host.roles.get(name) is old
                if is_same:
                    self._roles[name] = host
                    self._names.bind(name, Binding(host.name, role.number))
                    self._names.forget(name)
        except BaseException:
            self._discard(host, name)
            raise
        self._discard(old_host if is_same else host, name)
        return is_same

    def _settle(self, homeless: Collection[str]) -> None:
        """Give roles a process whose own no node has room for: that of another role of their kind, as its guests, until a
        node has room again. `homeless` are roles whose processes are gone, by the last health checks."""
        from overlord.runtime.ray.placement import has_room, is_restarting, is_running

        for name in [name for name in list(self._guests) if self._roles.get(name) is not self._guests[name]]:
            del self._guests[name]  # it was moved by another
        for name in homeless:
            host, options = self._roles.get(name), self._options_of(name)
            if host is None or not is_restarting(host.actor) or has_room(options):
                continue
            kind = kind_of(name)
            others = {other.name: other for role, other in list(self._roles.items()) if kind_of(role) == kind}
            running = [other for other in others.values() if other is not host and is_running(other.actor)]
            if running:
                self._take_in(list(host.roles), min(running, key=lambda other: len(other.roles)), options)
        if self._guests and has_room(self._options_of(next(iter(self._guests)))):
            name = next(iter(self._guests))
            if self._move(name, lambda role: self._start_role(role, None)):
                del self._guests[name]
                self.recorder.events.note("restart", f"role {name!r} has a process of its own again")

    def _take_in(self, names: Sequence[str], host: _RoleHost, options: ActorOptions) -> None:
        at_home = next(iter(host.roles))
        for name in names:
            if self._move(name, lambda role: self._add_role(role, host)):
                self._guests[name] = host
                told = (
                    f"role {name!r} lost its process, and no node has room for another one, which needs {options}: it runs "
                    f"in the process of {at_home!r} until one has"
                )
                self.recorder.events.note("restart", told)
                _log.warning("%s", told)

    def _discard(self, host: _RoleHost, name: str) -> None:
        """Stop a role that is in the place of another, or was to be."""
        with self._lock:
            role = host.roles.pop(name, None)
        if role is not None:
            self._drop(host, role, is_killed=False)

    def _start_role(self, role: HostedRole, node: str | None) -> tuple[_RoleHost, Any]:
        """Start a role on a node (None: where Ray places it); returns its actor, and what is there when it is made.

        Constructors of a node share as many processes as it has cores, or one on a small node. In a process that they share
        a row is looked for once and a chunk is mapped once for all of them; but one interpreter makes their batches.
        """
        kind = kind_of(role.name)
        home = node if kind == _CONSTRUCTOR else None
        sharing = [] if home is None else self._shared.setdefault(home, [])
        # While a role is made once more in its own process, that process has its name already.
        free = [host for host in sharing if role.name not in host.roles]
        if home is not None and free and len(sharing) >= processes_for(self._placement.cpus_of(home)):
            return self._add_role(role, free[choose_process(role.name, [host.roles for host in free])])
        host = self._take_spare(kind, node)
        if host is None:
            host = self._start_actor(role, node)
            started = host.actor.wait_until_made.remote(role.number)
        else:
            _, started = self._add_role(role, host)
        if home is not None:
            sharing.append(host)
        return host, started

    def _add_role(self, role: HostedRole, host: _RoleHost) -> tuple[_RoleHost, Any]:
        """Start a role in an actor that runs."""
        host.roles[role.name] = role
        self._names.list_roles(host.name, tuple(host.roles.values()))
        return host, host.actor.add_role.remote(role)

    def _take_spare(self, kind: str, node: str | None) -> _RoleHost | None:
        for spare in self._spare:
            if spare[0] == kind and node in (None, spare[1]):
                self._spare.remove(spare)
                return spare[2]
        return None

    def _start_actor(self, role: HostedRole, node: str | None) -> _RoleHost:
        import ray

        from overlord.runtime.ray.placement import strategy_for
        from overlord.runtime.ray.role_actor import HEALTH_CHECKS, RoleActor, own_release, working_folder

        assert self._size is not None  # start opens an engine before it spawns
        host_name, options = f"{role.name}#{role.number}", self._options_of(role.name)
        self._names.list_roles(host_name, (role,))
        num_cores = max(math.ceil(options.num_cpus), 1)
        num_workers = num_cores if self._size.num_workers is None else self._size.num_workers
        size = WorkplaceSize(num_workers, self._size.num_processes or num_cores)
        if node is not None and kind_of(role.name) == _CONSTRUCTOR:
            size = self._share_of_node(size, role.name, node)
        remote: Any = ray.remote
        actor = (
            remote(concurrency_groups={HEALTH_CHECKS: 1})(RoleActor)
            .options(
                name=host_name,
                namespace=self._names.namespace,
                max_restarts=-1,
                lifetime="detached" if self.roles_live_on else None,
                scheduling_strategy=strategy_for(node, options.placement == "spread"),
                **options.to_ray(),
            )
            .remote(
                host_name,
                self._names.namespace,
                self._patience_s,
                size,
                num_cores,
                release=own_release(),
                folder=working_folder(),
                watched=self._watched_by(role.name),
            )
        )
        return _RoleHost(host_name, actor, {role.name: role})

    def _watched_by(self, name: str) -> tuple[str, float] | None:
        """The namespace of the detached role that a role's process watches, and how long that may be silent."""
        if self._kept_by is None or self._hung_after_s is None or kind_of(name) != _PLANNER:
            return None
        return self._kept_by, self._hung_after_s

    def _share_of_node(self, size: WorkplaceSize, name: str, node: str) -> WorkplaceSize:
        """What a process of constructors may use beside the others of its node."""
        num_cpus = self._placement.cpus_of(node)
        num_groups = max(self._placement.num_beside(name, self._options_of(name)), len(self._shared.get(node, ())) + 1)
        num_sharing = min(processes_for(num_cpus), num_groups)
        return replace(size, machine_cores=max(math.floor(num_cpus), 1), num_sharing=num_sharing)

    def wait_until_started(self, names: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        with self._lock:
            if names is None and self._spare:
                _close([host.actor for _, _, host in self._spare])  # no role needs them
                self._spare = []
            waited_for = [name for name in self._starting if names is None or name in names]
            starting = {name: self._starting.pop(name) for name in waited_for}
        self._wait_for(starting, self._patience_s if timeout_s is None else timeout_s)

    def _wait_for(self, starting: Mapping[str, Any], timeout_s: float) -> None:
        """Wait for roles that are being made, by name."""
        import ray
        from ray import exceptions as ray_errors

        late = ray.wait(list(starting.values()), num_returns=len(starting), timeout=timeout_s)[1] if starting else []
        for name, ref in starting.items():
            if ref in late:
                raise WaitTimeoutError(
                    f"role {name!r} did not start within {timeout_s:.0f} s: it needs {self._options_of(name)}, and "
                    f"the cluster has {_describe(ray.available_resources())} free of {_describe(ray.cluster_resources())}; "
                    "add nodes, request less (loaders=, loader_hosts=), or wait longer (patience_s=)"
                )
            try:
                failed: Any = ray.get(ref)
            except ray_errors.RayActorError as error:
                raise WorkerDiedError(f"role {name!r} ended while it was started; see Ray's logs for why") from error
            if failed is not None:
                raise failed.open()

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return self._names.call(name, method, *args, **kwargs)

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return self._names.call_once(name, method, *args, **kwargs)

    def call_near(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RoleReply[Any]:
        return self._names.call_near(name, method, *args, **kwargs)

    def shares_memory_with(self, name: str) -> bool:
        return self._names.shares_memory_with(name)

    def tell(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        self._names.tell(name, method, *args, **kwargs)

    def rebind(self, name: str, to: str) -> None:
        from overlord.runtime.ray.names import Binding

        with self._lock:
            old, self._roles[name] = self._roles[name], self._roles.pop(to)
            role = self._roles[name].roles[to]
            self._names.bind(name, Binding(self._roles[name].name, role.number))
            self._names.unbind(to)
            dropped = old.roles.pop(name)
            self._roles[name].roles[name] = self._roles[name].roles.pop(to)
        self._drop(old, dropped, is_killed=True)

    def stop(self, name: str) -> None:
        with self._lock:
            host = self._roles.pop(name, None)
            self._starting.pop(name, None)
            self._names.unbind(name)
            dropped = None if host is None else host.roles.pop(name)
        if host is not None and dropped is not None:
            self._drop(host, dropped, is_killed=False)

    def _drop(self, host: _RoleHost, role: HostedRole, *, is_killed: bool) -> None:
        """Stop a role that no name is bound to any more, and its actor if it has no other."""
        import ray

        from overlord.runtime.ray.role_actor import HEALTH_CHECKS

        with self._lock:
            is_last = not host.roles
            if is_last:
                self._forget_shared(host)
            self._names.list_roles(host.name, tuple(host.roles.values()))
        if not is_last:
            ray.wait([host.actor.drop_role.remote(role.number)], timeout=_CLOSE_S)
        elif is_killed:
            # First, because a killed actor may answer for some milliseconds more, and its name means another role by now. An
            # actor that hangs answers nobody.
            forgetting = host.actor.forget_role.options(concurrency_group=HEALTH_CHECKS).remote(role.number)
            ray.wait([forgetting], timeout=_CLOSE_S)
            _kill([host.actor])
        else:
            _close([host.actor])

    def _forget_shared(self, host: _RoleHost) -> None:
        """Give no more constructors to an actor. The lock is held."""
        for sharing in self._shared.values():
            sharing[:] = [other for other in sharing if other is not host]

    def publish(self, key: str, value: object) -> None:
        self._names.publish(key, value)

    def look_up(self, key: str) -> Any:
        return self._names.look_up(key)

    def store_use(self) -> StoreUse | None:
        import ray

        limit = ray.cluster_resources().get("object_store_memory", 0)
        return StoreUse(int(limit - ray.available_resources().get("object_store_memory", 0)), int(limit))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            hosts = dict.fromkeys(self._roles.values())  # each once, in the order of spawning
            self._roles = {}
        if self._size is None:
            return
        if self._watch is not None:
            self._watch.close()
        import ray

        if not ray.is_initialized():  # the program has left the cluster, and its actors have ended with that
            self._names.close(0.0)
            self._cluster.leave()
            return
        self._names.closed.set()
        self._names.table.clear()
        # Last spawned, first stopped: a role is closed before those it calls.
        _close([host.actor for host in hosts][::-1])
        self._names.close(_CLOSE_S)
        self._names.table.clear()  # of what roles wrote while they were closed
        self._cluster.leave()

    def _running_roles(self) -> dict[str, tuple[str, Any]]:
        """Every role, with the name and the handle of its actor."""
        with self._lock:
            return {name: (host.name, host.actor) for name, host in self._roles.items()}

    def _options_of(self, name: str) -> ActorOptions:
        return self._options.get(kind_of(name), self._others)


def _close(actors: Sequence[Any]) -> None:
    """Close actors, and kill them when they have closed or after a timeout."""
    import ray

    if actors:
        closing = [actor.close.remote() for actor in actors]
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S, fetch_local=False)
    _kill(actors)


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor, no_restart=True)


def _describe(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('memory', 0):,.0f} bytes of memory"
