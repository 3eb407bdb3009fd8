"""`overlord serve --ray`: a run that is kept in a cluster, and what can be done to its driver, its own process and its
roles."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from overlord.runtime import liveness
from overlord.runtime.ray.role_actor import HEALTH_CHECKS
from tests.commands import start_service
from tests.faults.as_service import JOB_FILE, free_port
from tests.faults.disturbance import Cause, NotRecoveredError, signals, storage_causes, trainer_causes
from tests.faults.jobs import WORLD_SIZE
from tests.faults.schedule import Fault
from tests.faults.store import Store
from tests.faults.trainers import Trainers

_NAME = "disturbed"
_NAMESPACE = f"overlord-run-{_NAME}"
WEIGHTS: Mapping[str, int] = {
    "driver killed": 8,
    "run killed": 5,
    "run killed with its driver": 4,
    "run stopped without its driver": 1,
    "planner killed": 3,
    "constructor killed": 3,
    "loader killed": 3,
    "trainer killed": 3,
    "trainer paused": 2,
    "storage errors": 2,
    "storage stalls": 2,
}


class KeptOnRay:
    """See the module's docstring. This process is connected to the cluster; a driver that was killed is started again with
    the same command."""

    name = "kept"

    def __init__(self, folder: Path, store: Store, pace_s: float) -> None:
        self._job = folder / "job.py"
        self._job.write_text(JOB_FILE.format(url=store.url))
        self._words = folder / "driver.txt"
        self._address = f"127.0.0.1:{free_port()}"
        self._driver = self._start_driver()
        self.trainers = Trainers(self._address, WORLD_SIZE, folder, pace_s)
        self.causes: dict[str, Cause] = {
            **{f"{kind} killed": self._kill_role(prefix) for kind, prefix in _ROLES.items()},
            **trainer_causes(lambda: self.trainers),
            **storage_causes(store, lambda: self.trainers),
            "driver killed": self._kill_driver,
            "run killed with its driver": self._kill_both,
            "run stopped without its driver": self._stop_alone,
        }

    def close(self) -> None:
        self.trainers.close()
        self._driver.terminate()
        try:
            self._driver.wait(60)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()

    def _start_driver(self) -> subprocess.Popen[str]:
        cluster = ray.get_runtime_context().gcs_address
        options = ["--ray", cluster, "--name", _NAME, "--address", self._address]
        process = start_service(self._job, *options, errors=self._words)
        if process.poll() is not None:
            raise NotRecoveredError(f"the driver does not start: {self._words.read_text()[-1500:]}")
        return process

    def _kill_driver(self, fault: Fault) -> str:
        self._driver.kill()
        self._driver.wait()
        # A driver that comes back at once would be taken for a second one.
        self.trainers.wait(liveness.DRIVER_GONE.after_s + 2 * fault.amount)
        self._driver = self._start_driver()
        return "and started again"

    def _kill_both(self, fault: Fault) -> str:
        detail = self._kill_role("run#")(fault)
        return f"{detail}, and its driver, {self._kill_driver(fault)}"

    def _stop_alone(self, fault: Fault) -> str:
        self._driver.kill()
        self._driver.wait()
        detail = signals(lambda: self._processes("run#"), lambda: self.trainers)["stopped"](fault)
        self._driver = self._start_driver()
        return f"{detail}, whose driver was dead"

    def _kill_role(self, prefix: str) -> Cause:
        return signals(lambda: self._processes(prefix), lambda: self.trainers)["killed"]

    def _processes(self, prefix: str) -> list[tuple[str, int]]:
        """The processes of the roles whose names begin so; without those that are being made anew."""
        named: Any = list_named_actors(all_namespaces=True)
        found: list[tuple[str, int]] = []
        for entry in named:
            if entry["namespace"].startswith(_NAMESPACE) and entry["name"].startswith(prefix):
                with suppress(RayError, ValueError):
                    actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
                    report: Any = ray.get(actor.check_health.options(concurrency_group=HEALTH_CHECKS).remote(), timeout=5)
                    found.append((entry["name"], report.process))
        return found


_ROLES = {"run": "run#", "planner": "planner", "constructor": "constructor/", "loader": "loaders/"}
