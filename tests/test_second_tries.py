"""Second tries are for tests of processes: few, named, with a reason where marked. A run that needs many of them fails."""

import pytest

from tests.commands import ROOT

pytest_plugins = ["pytester"]

CONFTEST = f"""
import sys

sys.path.append({str(ROOT)!r})  # for the processes of pytest-xdist
from tests.second_tries import SecondTries

def pytest_configure(config):
    config.addinivalue_line("markers", "second_try(reason)")
    config.pluginmanager.register(SecondTries())
"""
FAILS_ONCE = """
import pathlib, pytest

def fail_once(number):
    marker = pathlib.Path(__file__).with_name(f"{number}.txt")
    if not marker.exists():
        marker.touch()
        raise AssertionError("the first time")
"""
MARKED = (
    FAILS_ONCE
    + """
@pytest.mark.second_try(reason="a process may be late")
@pytest.mark.parametrize("number", range(COUNT))
def test_late(number):
    fail_once(number)
"""
)


def run_pytest(pytester: pytest.Pytester, body: str, *arguments: str, where: str = "test_it.py") -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    path = pytester.path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(body)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments, path)


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECOND_TRIES", raising=False)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_three_second_tries_pass_and_a_fourth_fails_the_run_and_names_all(pytester: pytest.Pytester, workers: list[str]):
    few = run_pytest(pytester, MARKED.replace("COUNT", "3"), *workers)
    assert few.ret == pytest.ExitCode.OK
    few.stdout.fnmatch_lines("*3 passed, 3 rerun*")
    for marker in pytester.path.glob("*.txt"):
        marker.unlink()
    many = run_pytest(pytester, MARKED.replace("COUNT", "4"), *workers)
    assert many.ret == pytest.ExitCode.TESTS_FAILED
    many.stdout.fnmatch_lines(["*4 second tries were needed; a run with more than 3 fails:", "*4 passed, 4 rerun*"])
    many.stdout.fnmatch_lines_random([f"  test_it.py::test_late[[]{number}[]]" for number in range(4)])


def test_they_can_be_switched_off(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECOND_TRIES", "0")
    run_pytest(pytester, MARKED.replace("COUNT", "1")).assert_outcomes(failed=1)


PLAIN_ONCE = FAILS_ONCE + "def test_plain():\n    fail_once(0)\n"


def test_a_test_without_the_mark_has_one_try(pytester: pytest.Pytester):
    run_pytest(pytester, PLAIN_ONCE).assert_outcomes(failed=1)


def test_tests_of_processes_need_no_mark_and_are_named(pytester: pytest.Pytester):
    run = run_pytest(pytester, PLAIN_ONCE, where="service/test_it.py")
    assert run.ret == pytest.ExitCode.OK
    run.stdout.fnmatch_lines(["*1 second tries were needed*", "  service/test_it.py::test_plain"])


def test_a_property_has_one_try_there_too(pytester: pytest.Pytester):
    body = (
        FAILS_ONCE
        + "from hypothesis import given, strategies as st\n@given(st.just(0))\ndef test_it(n):\n    fail_once(n)\n"
    )
    run_pytest(pytester, body, where="service/test_it.py").assert_outcomes(failed=1)


MARK = "import pytest\nfrom hypothesis import given, strategies as st\n@pytest.mark.second_try"
PLAIN = "\ndef test_it():\n    pass\n"


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        (MARK + PLAIN, "test_it.py", "second_try takes one argument, reason="),
        (MARK + "(reason='')" + PLAIN, "test_it.py", "second_try takes one argument, reason="),
        (MARK + "(reason='x')" + PLAIN, "contract/test_it.py", "a property of the stream has no second try"),
        (
            MARK + "(reason='x')\n@given(st.integers())\ndef test_it(n):\n    pass\n",
            "test_it.py",
            "a hypothesis test has no",
        ),
        ("import pytest\npytestmark = pytest.mark.second_try(reason='x')" + PLAIN, "test_it.py", "mark single tests"),
    ],
    ids=["bare", "empty", "stream", "property", "file"],
)
def test_a_mark_that_is_too_wide_or_gives_no_reason_is_refused(
    pytester: pytest.Pytester, body: str, where: str, message: str
):
    run = run_pytest(pytester, body, where=where)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(f"*test_it: {message}*")
