"""Second tries for tests that race real processes against a deadline, and a limit on how many a run may need.

A machine that does ten other things may starve a process for longer than any sensible deadline. A test that starts, kills or
waits for real processes may therefore be marked, one by one, with `@pytest.mark.second_try(reason="...")`; those in the
rooms of processes, commands, browsers, servers and threads have a second try without it. Properties of the stream, and
whatever is computed by one thread, have no such excuse. A run names every test that needed one; `SECOND_TRIES=0` switches
all second tries off.
"""

from __future__ import annotations

import os

import pytest

MOST = 3
"""A run in which more tests needed their second try fails: that is no longer chance."""

_NEVER_IN = frozenset({"contract", "stream"})
_PROCESSES_IN = frozenset(
    {"caches", "cli", "faults", "fleet", "integrations", "roles", "runtime", "service", "sources", "trainer"}
)


class SecondTries:
    """The plugin. Under pytest-xdist only the controller judges; every report passes through it."""

    def __init__(self) -> None:
        self._needed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("second_try")
            if mark is None and (_PROCESSES_IN.isdisjoint(item.path.parts) or _is_property(item)):
                continue
            if mark is not None and (wrong := _objection(item, mark)):
                raise pytest.UsageError(f"{item.nodeid}: {wrong}")
            if os.environ.get("SECOND_TRIES") != "0":
                item.add_marker(pytest.mark.flaky(reruns=1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # an outcome of pytest-rerunfailures
            self._needed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if len(self._needed) > MOST and not is_worker and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._needed:
            terminalreporter.section("second tries", red=len(self._needed) > MOST)
            terminalreporter.line(f"{len(self._needed)} second tries were needed; a run with more than {MOST} fails:")
            for nodeid in self._needed:
                terminalreporter.line(f"  {nodeid}")


def _objection(item: pytest.Item, mark: pytest.Mark) -> str | None:
    if mark.args or set(mark.kwargs) != {"reason"} or not mark.kwargs["reason"]:
        return "second_try takes one argument, reason=, that says which process may miss which deadline"
    if not _NEVER_IN.isdisjoint(item.path.parts):
        return "a property of the stream has no second try"
    if _is_property(item):
        return "a hypothesis test has no second try"
    if item.get_closest_marker("second_try") not in item.own_markers:
        return "mark single tests, not a class or a file"
    return None


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
