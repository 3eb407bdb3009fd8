"""The table of detectors is the one on the page, and the numbers that users may set have their defaults from it."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.runtime import liveness
from overlord.runtime.liveness import DETECTORS, Detector

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
HEAD = "| watched | by | sign of life | missing for | then |"


def row(detector: Detector) -> str:
    """A detector as a line of the page."""
    limit = "no limit" if math.isinf(detector.after_s) else f"{detector.after_s:g} s"
    if detector.misses > 1:
        limit += f", {detector.misses} times in a row"
    if detector.checks > 1:
        limit += f", at {detector.checks} signs of life in that time"
    if detector.setting:
        limit += f" (`{detector.setting}`)"
    return f"| {detector.watched} | {detector.watcher} | {detector.sign} | {limit} | {detector.then} |"


def test_the_page_has_every_detector_and_no_other():
    lines = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    assert lines == [row(detector) for detector in DETECTORS]


def test_every_detector_of_the_module_is_in_the_table():
    named = [value for value in vars(liveness).values() if isinstance(value, Detector)]
    assert named == list(DETECTORS)


@pytest.mark.parametrize("detector", [each for each in DETECTORS if each.setting], ids=lambda each: each.setting)
def test_a_setting_that_replaces_a_deadline_has_it_as_its_default(detector: Detector):
    found = re.fullmatch(r"([\w.]+)\((\w+)=\)", detector.setting)
    assert found is not None
    owner: Any = ol
    for name in found[1].split("."):
        owner = getattr(owner, name)
    default = inspect.signature(owner).parameters[found[2]].default
    assert default == (None if math.isinf(detector.after_s) else detector.after_s)


def test_what_the_rows_say_of_pauses_is_what_is_waited():
    assert f"every {liveness.SERVER_PAUSE_S:g} s" in liveness.SERVER_ANSWER.then
    assert f"every {liveness.SERVER_PAUSE_S:g} s" in liveness.SERVER_CONTROL.then
    assert f"for {liveness.NEXT_START_S:g} s" in liveness.HOST_STARTING.then
    assert f"{ol.policies.Retry().request_timeout_s:g} s" in liveness.STORAGE.sign
