"""What the distribution says of itself: one version, and lower bounds that a run with the lowest releases proves."""

import re
import tomllib
from pathlib import Path

import overlord as ol

HERE = Path(__file__).parent.parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_distribution():
    assert ol.__version__ == PROJECT["version"]


def test_the_lowest_releases_that_are_tested_are_the_lower_bounds():
    asked = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", each)[0] for each in asked)
    lines = (HERE / "constraints" / "lowest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(tested) == set(bounds)
    # torch is not: builds for machines without a GPU are not to be had of every release.
    assert [name for name, bound in bounds.items() if name != "torch" and not f"{tested[name]}.0.0".startswith(bound)] == []


def test_every_extra_is_named_in_the_readme():
    readme = (HERE / "README.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"| `{extra}` |" not in readme] == []
