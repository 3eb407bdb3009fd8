"""The page of metrics, the dashboard and the code name the same metrics."""

import json
import re

import pytest

from overlord.runtime.events import KINDS
from overlord.service.metric_table import FAMILIES
from tests.commands import ROOT, python

PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "overlord.json").read_text("utf-8"))


def test_the_page_lists_every_metric_with_its_type_labels_and_meaning_and_no_other():
    rows = re.findall(r"^\| `(overlord_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    labels = [", ".join(f"`{label}`" for label in family.labels) or "-" for family in FAMILIES]
    expected = [(f.full_name, f.kind, label, f.help) for f, label in zip(FAMILIES, labels, strict=True)]
    assert rows == expected


def test_the_page_lists_every_kind_of_event():
    assert dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|$", PAGE, re.MULTILINE)) == KINDS


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_keep_to_the_conventions(family):
    assert re.fullmatch(r"overlord_[a-z]+(_[a-z]+)*", family.name)
    assert not family.name.endswith(("_total", "_ms", "_mb", "_percent", "_count", "_sum", "_bucket"))
    for unit in ("seconds", "bytes", "ratio"):
        if unit in family.name:
            assert family.name.endswith(unit), "the unit comes last"
    assert family.help.endswith(".")


def test_every_query_of_the_dashboard_names_metrics_that_exist_and_every_metric_is_shown():
    exists = {name for family in FAMILIES for name in names_of(family)}
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"\boverlord_\w+", query)}
    assert used <= exists
    unseen = {"overlord_up_seconds", "overlord_source_samples_total", "overlord_source_chunks_total"}
    unseen |= {"overlord_source_read_bytes_total", "overlord_rank_next_step", "overlord_store_limit_bytes"}
    shown = {family.full_name for family in FAMILIES if names_of(family) & used}
    assert {family.full_name for family in FAMILIES} - shown == unseen
    for query in queries:
        assert query.count("(") == query.count(")")
        labels = set(re.findall(r"by \((\w+)\)", query))
        assert labels <= {"le"}


def test_legends_of_the_dashboard_use_labels_of_their_metric():
    labels = {name: {*family.labels, "le"} for family in FAMILIES for name in names_of(family)}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            first = re.findall(r"\boverlord_\w+", target["expr"])[0]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[first], panel["title"]


def names_of(family) -> set[str]:
    if family.kind == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return {family.full_name}


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_the_example_logs_every_step_to_either_logger(to, tmp_path):
    """With stand-ins that have the two libraries' calls: neither is a dependency of the tests."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    (tmp_path / "run.py").write_text(RUN.format(example=str(ROOT / "examples" / "log_metrics.py"), to=to))
    out = python(tmp_path / "run.py", PYTHONDONTWRITEBYTECODE="1").stdout
    logged = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    steps = {entry["step"] for entry in logged if "overlord/wait_s" in entry["names"]}
    assert steps == set(range(20))
    assert any("overlord/share/documents" in entry["names"] for entry in logged)
    assert f"logged 20 steps to {to}" in out


FAKE_WANDB = """
import json
class Run:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def log(self, numbers, step): print(json.dumps({"step": step, "names": sorted(numbers)}))
def init(project): return Run()
"""
RUN = """
import json, runpy, sys, types
fake = types.ModuleType("torch.utils.tensorboard")
class SummaryWriter:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def add_scalar(self, name, value, step): print(json.dumps({{"step": step, "names": [name]}}))
fake.SummaryWriter = SummaryWriter
sys.modules["torch.utils.tensorboard"] = fake
sys.argv = ["example", "--to", "{to}"]
runpy.run_path("{example}", run_name="__main__")
"""
