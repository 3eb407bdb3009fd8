"""The example and the benchmark run as users run them."""

import re

from tests.commands import ROOT, python


def test_the_example_reads_through_overlord_and_prints_a_table_of_all_arms():
    printed = python("-W", "error", ROOT / "examples" / "low_data_finetune.py", "--quick").stdout
    number = r"\s+[+-]?\d+\.\d+ ± \d+\.\d+"
    assert re.search(r"plain\s+linear\s+sigmoid\s+linear - plain\s+sigmoid - plain", printed)
    assert re.search(rf"^\s+10%\s+32{number * 5}$", printed, re.MULTILINE)
    assert re.search(rf"^\s+100%\s+320{number * 5}$", printed, re.MULTILINE)


def test_the_benchmark_runs_with_torch_and_numpy_alone():
    """On a machine that only trains: nothing else of Overlord is imported, nor what that needs."""
    others = ("pyarrow", "orjson", "overlord.service.run")
    code = f"import bench.tempbalance_overhead, sys; print([m for m in {others} if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"
