"""Second tries are for marked tests alone, few, with a reason; and a run that needs many of them fails."""

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
def test_two_second_tries_pass_and_a_third_fails_the_run_and_names_all(pytester: pytest.Pytester, workers: list[str]):
    few = run_pytest(pytester, MARKED.replace("COUNT", "2"), *workers)
    assert few.ret == pytest.ExitCode.OK
    few.stdout.fnmatch_lines("*2 passed, 2 rerun*")
    for marker in pytester.path.glob("*.txt"):
        marker.unlink()
    many = run_pytest(pytester, MARKED.replace("COUNT", "3"), *workers)
    assert many.ret == pytest.ExitCode.TESTS_FAILED
    many.stdout.fnmatch_lines(["*3 second tries were needed; a run with more than 2 fails:", "*3 passed, 3 rerun*"])
    many.stdout.fnmatch_lines_random([f"  test_it.py::test_late[[]{number}[]]" for number in range(3)])


def test_they_can_be_switched_off(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECOND_TRIES", "0")
    run_pytest(pytester, MARKED.replace("COUNT", "1")).assert_outcomes(failed=1)


def test_a_test_without_the_mark_has_one_try(pytester: pytest.Pytester):
    run_pytest(pytester, FAILS_ONCE + "def test_plain():\n    fail_once(0)\n").assert_outcomes(failed=1)


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
