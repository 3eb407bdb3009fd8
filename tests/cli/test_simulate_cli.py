"""`overlord simulate` as users meet it: figures, the page, and what it says to wrong values."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from overlord.arrange.cost import TransformerCost
from overlord.cli import main
from overlord.steering.cost_file import save_cost
from tests.commands import python

NUMBER = (int, float)
SIDE = {
    "step_s": NUMBER,
    "straggler": NUMBER,
    "bubbles": NUMBER,
    "sending": NUMBER,
    "padding": NUMBER,
    "most_tokens": int,
    "microbatches": list,
}
ROLE = {
    "name": str,
    "count": int,
    "bytes_each": int,
    "bytes": int,
    "connections_each": int,
    "connections": int,
}
STEP = {
    "step": int,
    "samples": int,
    "tokens": int,
    "longest": int,
    "before_s": NUMBER,
    "after_s": NUMBER,
    "ratio": NUMBER,
    "plan_s": NUMBER,
}
SMALL = ("--preset", "github", "--ranks", "64", "--context", "64k", "--sources", "8", "--steps", "2")

JOB = """
import overlord as ol
from tests.small_sources import Numbered

job = ol.Job(
    sources={"a": Numbered(rows=400, first=1), "b": Numbered(rows=100, first=500, repeat=False)},
    mixture=ol.Mixture({"a": 3, "b": 1}, unit="tokens", stop="first_exhausted"),
    batch=ol.Batch(tokens=64, sequence_length=16),
    mesh=ol.Mesh(dp=2, cp=2),
    strategy=ol.strategies.long_short(ol.TransformerCost(1.0, 0.1)),
)
"""


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def told_error(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    if code == 2:
        with pytest.raises(SystemExit) as left:
            main(["simulate", *map(str, arguments)])
        assert left.value.code == 2
    else:
        assert main(["simulate", *map(str, arguments)]) == code
    return capsys.readouterr().err


def has(found: dict, schema: dict) -> None:
    assert set(found) == set(schema)
    for name, kind in schema.items():
        assert isinstance(found[name], kind), name


def test_the_figures_have_the_shape_that_is_promised(capsys):
    found = figures(capsys, *SMALL)
    assert set(found) == {
        "scenario",
        "ratio",
        "before",
        "after",
        "plan_s",
        "load",
        "roles",
        "baseline",
        "memory_ratio",
        "steps",
    }
    has(found["before"], SIDE)
    has(found["after"], SIDE)
    for role in (*found["roles"], found["baseline"]):
        has(role, ROLE)
        assert role["bytes"] == pytest.approx(role["count"] * role["bytes_each"], rel=1e-6, abs=role["count"])
    assert [load["name"] for load in found["load"]] == ["planner", "hosts of constructors"]
    assert all(load["cpu_ms_each"] > 0 and load["messages_each"] > 0 and load["bytes_each"] > 0 for load in found["load"])
    assert [role["name"] for role in found["roles"]] == ["planner", "loader hosts", "constructors", "clients"]
    assert len(found["steps"]) == 2
    for step in found["steps"]:
        has(step, STEP)
        assert step["ratio"] == pytest.approx(step["before_s"] / step["after_s"])
    scenario = found["scenario"]
    assert scenario["mesh"] == {"dp": 8, "cp": 8, "pp": 1, "tp": 1}
    assert (scenario["strategy"], scenario["sources"], scenario["batch_tokens"]) == ("hdp", 8, 64 * 32768)
    assert found["ratio"] > 1
    assert found["after"]["straggler"] < 1.1


def test_the_same_seed_gives_the_same_figures_and_another_seed_others(capsys):
    def stripped(*more: object) -> tuple:
        found = figures(capsys, *SMALL, *more)
        return found["ratio"], found["before"], found["after"]

    assert stripped() == stripped()
    assert stripped() != stripped("--seed", 1)


@pytest.mark.parametrize(
    "more",
    [
        ("--strategy", "plain"),
        ("--strategy", "long_short"),
        ("--strategy", "long_short", "--pp", "2", "--tp", "2"),
        ("--strategy", "hdp", "--offload", "25"),
        ("--strategy", "hdp", "--pp", "2"),
        ("--costs", "h200", "--kv-heads", "32"),
        ("--preset", "llava-like", "--context", "8k"),
        ("--preset", "llava-like", "--context", "8k", "--strategy", "multimodal_exchange"),
    ],
)
def test_every_strategy_can_be_simulated_and_none_is_slower_than_dealing_blindly(capsys, more):
    found = figures(capsys, *SMALL, *more)
    blind = found["scenario"]["strategy"] == "plain"
    assert found["ratio"] == pytest.approx(1.0) if blind else found["ratio"] > 1
    assert 0 <= found["after"]["bubbles"] < 1


def test_a_job_is_simulated_from_its_own_documents_with_its_own_strategy(capsys, tmp_path):
    path = tmp_path / "simulated_job.py"
    path.write_text(JOB)
    found = figures(capsys, path, "--steps", "3")
    assert found["scenario"]["mesh"] == {"dp": 2, "cp": 2, "pp": 1, "tp": 1}
    assert found["scenario"]["sources"] == 2
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert all(step["tokens"] <= 64 for step in found["steps"])
    wider = figures(capsys, path, "--steps", "3", "--ranks", "16", "--cp", "1", "--strategy", "plain")
    assert wider["scenario"]["mesh"]["dp"] == 16
    same = ("samples", "tokens", "longest")
    assert [[step[name] for name in same] for step in wider["steps"]] == [
        [step[name] for name in same] for step in found["steps"]
    ], "which samples a step has does not depend on the mesh"


def test_a_job_that_ends_early_gives_the_steps_it_has(capsys, tmp_path):
    path = tmp_path / "short_job.py"
    path.write_text(JOB)
    found = figures(capsys, path, "--steps", "400")
    assert 1 < len(found["steps"]) < 400


def test_coefficients_can_come_from_a_file_that_calibrate_writes(capsys, tmp_path):
    path = tmp_path / "costs.json"
    save_cost(path, TransformerCost(1e-4, 2e-9, 1e-5), {"model": "two blocks"})
    costs = figures(capsys, *SMALL, "--costs", path)["scenario"]["costs"]
    assert (costs["per_token_s"], costs["per_length_squared_s"], costs["constant_s"]) == (1e-4, 2e-9, 1e-5)
    costs = figures(capsys, *SMALL, "--costs", path, "--measured-layers", 2, "--layers", 8)["scenario"]["costs"]
    assert (costs["per_token_s"], costs["per_length_squared_s"]) == pytest.approx((4e-4, 8e-9))


def test_a_cost_file_that_is_none_is_told(capsys, tmp_path):
    path = tmp_path / "costs.json"
    assert "cannot be read" in told_error(capsys, *SMALL, "--costs", path)
    path.write_text("{}")
    assert "holds no costs" in told_error(capsys, *SMALL, "--costs", path)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "give a job file or --preset, and not both"),
        (("job.py", "--preset", "byted"), 2, "give a job file or --preset, and not both"),
        (("--preset", "nowhere"), 2, "invalid choice: 'nowhere'"),
        (("--preset", "byted", "--ranks", "many"), 2, "must be a whole number of at least 1, got 'many'"),
        (("--preset", "byted", "--steps", "0"), 2, "must be at least 1, got 0"),
        (("--preset", "byted", "--offload", "-1"), 2, "must be a number above 0, got '-1'"),
        (("--preset", "byted", "--ranks", "64", "--context", "1M"), 1, "needs 128 ranks of 8,192, but"),
        (("--preset", "byted", "--ranks", "100", "--tp", "8"), 1, "tp=8 x pp=1 must divide the 100 ranks"),
        (("--preset", "byted", "--ranks", "64", "--dp", "3"), 1, "ranks, not 64; leave one of --ranks, --dp and --cp out"),
        (("--preset", "byted", "--ranks", "64", "--batch-tokens", "100001"), 1, "must be a multiple of sequence_length"),
        (("--preset", "byted", "--html", "/nowhere/page.html"), 1, "the page cannot be written to /nowhere/page.html"),
        (("nowhere.py",), 1, "there is no job file nowhere.py"),
    ],
)
def test_wrong_values_are_told_with_the_way_out(capsys, arguments, code, message):
    assert message in told_error(capsys, *arguments, code=code)


class Resources(HTMLParser):
    """Collects what a page would load from elsewhere, and its script."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str]] = []
        self.script = ""
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "data", "srcset", "action", "poster", "background"):
                self.loaded.append((tag, str(value)))

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.script += data


def figures_in(page: str) -> dict[str, Any]:
    found = re.search(r"const F = (.*);\n", page)
    assert found is not None
    return json.loads(found[1])


def test_the_page_is_one_file_that_loads_nothing(capsys, tmp_path):
    path = tmp_path / "page.html"
    found = figures(capsys, *SMALL, "--html", path)
    page = path.read_text("utf-8")
    parser = Resources()
    parser.feed(page)
    assert parser.loaded == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    outside = set(re.findall(r"https?://[^\s\"']+", page))
    assert outside <= {"http://www.w3.org/2000/svg"}  # the name of a vocabulary, never fetched
    shown = figures_in(parser.script)
    assert shown["ratio"] == found["ratio"]
    bars = shown["bars"]
    assert [each["step"] for each in bars] == [0, 1]
    for side in ("before", "after"):
        assert len(bars[0][side]["busy"]) == 64
        assert max(bars[0][side]["busy"]) == pytest.approx(
            bars[0][side]["mean_of_all"] * bars[0][side]["straggler"], rel=1e-4
        )
    assert "prefers-color-scheme: dark" in page


def test_text_in_a_page_cannot_end_its_script(capsys, tmp_path):
    folder = tmp_path / "<"
    folder.mkdir()
    path = folder / "escaped_job.py"
    path.write_text(JOB)
    figures(capsys, path, "--steps", "1", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "\\u003c/escaped_job.py" in page
    assert page.count("</script>") == 1


def test_sixteen_thousand_ranks_are_planned_here_and_share_bars(capsys, tmp_path):
    path = tmp_path / "page.html"
    found = figures(
        capsys, "--preset", "byted", "--ranks", "16k", "--context", "2M", "--costs", "h200", "--steps", "1", "--html", path
    )
    assert found["scenario"]["ranks"] == 16_384
    assert found["scenario"]["mesh"] == {"dp": 64, "cp": 256, "pp": 1, "tp": 1}
    assert found["ratio"] > 2
    assert found["after"]["most_tokens"] <= 8192
    assert path.stat().st_size < 200_000
    side = figures_in(path.read_text("utf-8"))["bars"][0]["after"]
    assert (side["num_ranks"], side["ranks_per_bar"], len(side["busy"])) == (16_384, 64, 256)


def test_the_command_prints_tables_and_shows_its_progress_beside_them():
    run = python("-W", "error", "-m", "overlord", "simulate", *SMALL)
    assert "step 2 of 2" in run.stderr
    for text in ("slowest rank over mean", "bubbles", "padding", "constructors", "baseline workers", "planning took"):
        assert text in run.stdout
    assert re.search(r"predicted: \d+\.\d\d times as fast", run.stdout)
