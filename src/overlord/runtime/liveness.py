"""When is a part considered dead? The one table of detectors and deadlines.

Each row names the watched part, its watcher, the sign of life, how long that may be missing, and the reaction. Code that
declares a part dead takes its deadline from here. docs/operations.md shows the same rows, and a test compares them. A false
alarm is always safe: the replacement computes the same, so a deadline that is too short costs time and never changes a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One way to notice that a part is dead, hung or out of reach."""

    watched: str
    watcher: str
    sign: str
    """The sign of life."""
    after_s: float
    """How long the sign may be missing; infinity means no limit, unless `setting` sets one."""
    misses: int = 1
    """How many deadlines in a row must pass."""
    checks: int = 1
    """How many signs of life are requested or sent within one deadline."""
    setting: str = ""
    """The public option that replaces `after_s`."""
    then: str

    @property
    def every_s(self) -> float:
        """The time between two signs of life."""
        return self.after_s / self.checks


# Loader hosts, and the roles around them.

HOST_SLOW = Detector(
    watched="a loader host that has a shadow",
    watcher="the planner or constructor that calls it",
    sign="it answers the call",
    after_s=0.2,  # longer than nearly every answer of a healthy host, shorter than a step
    then="the same call is sent to its shadow too, and the first answer counts (a hedged request)",
)
HOST_SUSPECT = Detector(
    watched="a loader host whose shadow answered first",
    watcher="the planner or constructor that called it",
    sign="none",
    after_s=2.0,  # longer than it takes until the shadow has taken over the name
    then="until then calls go to the shadow first; after that to the host again",
)
HOST_LOST = Detector(
    watched="a loader host that has a shadow",
    watcher="the loader control loop, in the process that started the run",
    sign="it answers a status call",
    after_s=2.0,
    misses=2,  # one may be chance: a busy machine
    then="the host is stopped, and its shadow takes over its name",
)
HOST_COPIED = Detector(
    watched="a loader host that has a shadow",
    watcher="its shadow, while it copies a chunk",
    sign="it answers the call for the chunk",
    after_s=5.0,  # requests do not wait for copies
    then="the shadow makes the chunk itself, and reads ahead until its host answers again",
)
HOST_STARTING = Detector(
    watched="a loader host or shadow that is added during a run",
    watcher="the loader control loop",
    sign="it has started",
    after_s=30.0,
    then="it is stopped, the run continues without it, and no other is started for 60 s",
)
ROLE_OF_LOOP = Detector(
    watched="the planner and the constructors",
    watcher="the loader control loop",
    sign="they answer a status call",
    after_s=5.0,
    then="a warning of the logger `overlord.scaling`; the loop skips this round",
)
ROLE_BUSY = Detector(
    watched="the planner and the loader hosts",
    watcher="the explanation of a long wait",
    sign="they answer a call for their current work",
    after_s=1.0,
    then="the explanation says that they do not answer",
)
ROLE_REPORT = Detector(
    watched="the planner and the constructors",
    watcher="`loader.report()`, `status()` and a client that is closed",
    sign="they answer the call",
    after_s=10.0,
    then="`WaitTimeoutError`; a client that is closed only logs it",
)

# Roles on Ray.

RAY_HUNG = Detector(
    watched="a role on Ray that has answered before",
    watcher="the engine, in the process that started the run",
    sign="its actor answers a health check, also while the role is busy",
    after_s=30.0,
    checks=6,
    setting="Ray(hung_after_s=)",
    then="its process is killed, and Ray starts the role again",
)
RAY_STARTING = Detector(
    watched="a role on Ray that has not answered since it was started",
    watcher="the engine",
    sign="it answers a health check, or Ray says that it runs",
    after_s=60.0,
    setting="Ray(patience_s=)",
    then="Ray is told to start it again; at the start of a run: `WaitTimeoutError`",
)
RAY_GONE = Detector(
    watched="a role on Ray that died",
    watcher="each of its callers",
    sign="it answers the repeated call",
    after_s=60.0,
    setting="Ray(patience_s=)",
    then="`WorkerDiedError`",
)
RAY_HOMELESS = Detector(
    watched="a role on Ray that died, and for which no node has room, while others of its kind run",
    watcher="the engine, in the process that started the run, six times in `Ray(hung_after_s=)`",
    sign="it answers a health check, or a node has room for it",
    after_s=5.0,
    misses=2,  # a process that was killed is replaced within the first
    then="it goes on in the process of another of its kind, until a node has room",
)
RAY_REBOUND = Detector(
    watched="the actor behind the name of a role",
    watcher="each of its callers",
    sign="it answers the call",
    after_s=1.0,
    then="the name is looked up again; if another actor has it now, the call is repeated there",
)
RAY_KILL = Detector(
    watched="the killing of a hung process on another node",
    watcher="the engine",
    sign="that node confirms it",
    after_s=5.0,
    then="Ray is told to kill the actor, which may take longer",
)
RAY_CLOSING = Detector(
    watched="a role on Ray that is closed",
    watcher="the engine",
    sign="its `close` has returned",
    after_s=1.0,
    then="its process is killed",
)

DRIVER_GONE = Detector(
    watched="the process of `overlord serve job.py --ray`",
    watcher="the run, which lives in the cluster",
    sign="a call",
    after_s=10.0,
    checks=10,
    then="the run goes on without it; the same command takes the run back",
)
RUN_HUNG = Detector(
    watched="the process that has the run of `overlord serve job.py --ray`, or of `attach` on a cluster",
    watcher="that command or rank 0, and the planner's process: also without them",
    sign="it answers a health check",
    after_s=30.0,
    checks=6,
    then="it is killed, and Ray starts it again",
)
RUN_FORGOTTEN = Detector(
    watched="the users of a run without its `overlord serve job.py --ray`",
    watcher="the run",
    sign="a rank reads",
    after_s=600.0,
    then="the run ends",
)
RUN_LEFT = Detector(
    watched="the trainers of a run that `attach` started on a cluster, once rank 0 is lost",
    watcher="the run",
    sign="a rank reads",
    after_s=60.0,
    then="the run ends",
)

# Roles in processes of this machine.

PROCESS_HUNG = Detector(
    watched="a worker process of the engine `Processes`",
    watcher="its supervisor, a thread of the process that started the run",
    sign="it answers a health check, also while its roles are busy",
    after_s=30.0,
    checks=6,
    setting="Processes(hung_after_s=)",
    then="it is killed, another is started, and its roles are made again",
)
PROCESS_STARTING = Detector(
    watched="a worker process of the engine that starts",
    watcher="its supervisor",
    sign="it says that it can make roles",
    after_s=60.0,
    misses=3,
    then="it is killed and another is started; the last time at the start of a run: `WorkerDiedError`",
)
PROCESS_GONE = Detector(
    watched="a role whose worker process died",
    watcher="each of its callers",
    sign="it answers the repeated call",
    after_s=60.0,
    setting="Processes(patience_s=)",
    then="`WorkerDiedError`",
)
PROCESS_REBOUND = Detector(
    watched="the role behind a name, in a worker process",
    watcher="each of its callers",
    sign="it answers the call",
    after_s=1.0,
    then="the name is looked up again; if another role has it now, the call is repeated there",
)
PROCESS_CLOSING = Detector(
    watched="a worker process of the engine that is closed",
    watcher="the engine",
    sign="it has closed its roles and ended",
    after_s=1.0,
    then="it is killed",
)

# Worker processes of transforms.

WORKER_STARTING = Detector(
    watched="a worker process that starts, or loads a function",
    watcher="its supervisor, a thread of the process that has the pool",
    sign="it says that it is ready",
    after_s=120.0,
    misses=3,
    then="it is killed and another is started; the last time: `WorkerDiedError`",
)
WORKER_HUNG = Detector(
    watched="a worker process that runs a slice of rows",
    watcher="its supervisor",
    sign="it answers with the transformed rows",
    after_s=math.inf,
    misses=2,
    setting="InProcesses(timeout_s=)",
    then="it is killed, and another gets the slice; then each row alone, and a row that kills again is a bad row",
)
WORKER_EXIT = Detector(
    watched="a worker process that closed its connection",
    watcher="its supervisor",
    sign="its exit code can be read",
    after_s=1.0,
    then="it is killed; the error message cannot name the exit code",
)
WORKER_PARENT = Detector(
    watched="the process that has the pool",
    watcher="each worker process",
    sign="it is still the parent (on Linux the kernel also sends a signal)",
    after_s=1.0,
    then="the worker exits",
)

# Trainers and the service.

RANK_SILENT = Detector(
    watched="a rank that reads over the network, or is expected to",
    watcher="the service",
    sign="a heartbeat, or a request for a step",
    after_s=60.0,
    checks=4,
    setting="Loader.serve(leave_after_s=)",
    then="the other ranks no longer wait for it; when it calls again, it continues where it was",
)
SERVER_ANSWER = Detector(
    watched="a server of the service",
    watcher="a client",
    sign="it answers the call; a request for a step has this much time beyond its own timeout",
    after_s=30.0,
    then="every 0.1 s, until its own `timeout_s`, the client asks the service's address which server has its rank now",
)
SERVER_CONTROL = Detector(
    watched="the service",
    watcher="`overlord mix ADDRESS`",
    sign="it answers the call, after the planner has finished drawing the current step",
    after_s=60.0,
    then="the call is repeated every 0.1 s, until the command's own timeout",
)
STRANGER = Detector(
    watched="a connection to a service that has a token",
    watcher="the service",
    sign="it has shown the token",
    after_s=30.0,
    then="the connection is closed",
)

# Storage, and everything else.

STORAGE = Detector(
    watched="storage that data is read from",
    watcher="the reader of a source",
    sign="a request succeeds (one attempt may take 60 s)",
    after_s=120.0,
    setting="policies.Retry(deadline_s=)",
    then="`StorageError`; the next call of `next` retries",
)
LOG_STORAGE = Detector(
    watched="storage that the plan log is written to",
    watcher="the planner",
    sign="a request succeeds",
    after_s=20.0,
    then="one warning; the run continues from memory and retries with every step",
)
LONG_WAIT = Detector(
    watched="any wait of a client",
    watcher="a background thread of the client",
    sign="the wait is over",
    after_s=30.0,
    then="a warning of the logger `overlord.waiting` names the part that has not answered; nothing is considered dead",
)

DETECTORS = (
    HOST_SLOW,
    HOST_SUSPECT,
    HOST_LOST,
    HOST_COPIED,
    HOST_STARTING,
    ROLE_OF_LOOP,
    ROLE_BUSY,
    ROLE_REPORT,
    RAY_HUNG,
    RAY_STARTING,
    RAY_GONE,
    RAY_HOMELESS,
    RAY_REBOUND,
    RAY_KILL,
    RAY_CLOSING,
    DRIVER_GONE,
    RUN_HUNG,
    RUN_FORGOTTEN,
    RUN_LEFT,
    PROCESS_HUNG,
    PROCESS_STARTING,
    PROCESS_GONE,
    PROCESS_REBOUND,
    PROCESS_CLOSING,
    WORKER_STARTING,
    WORKER_HUNG,
    WORKER_EXIT,
    WORKER_PARENT,
    RANK_SILENT,
    SERVER_ANSWER,
    SERVER_CONTROL,
    STRANGER,
    STORAGE,
    LOG_STORAGE,
    LONG_WAIT,
)
"""Every detector, in the order of the page."""

STATUS_EVERY_S = 0.5
"""The time between two rounds of the loader control loop, unless `Autoscale(every_s=)` says otherwise."""
NEXT_START_S = 60.0
"""After a loader host or shadow could not be started: the time until the next attempt."""
SERVER_PAUSE_S = 0.1
"""Between two attempts to reach a service."""
REROUTES = 8
"""How often a call follows a loader host's name to another host before the caller gets ClosedError."""
