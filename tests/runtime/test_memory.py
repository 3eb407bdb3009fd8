"""What a process of ours needs beside data: heaps for its threads, and modules that it shares with its template."""

import ctypes
import importlib
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.runtime.memory import give_threads_heaps
from overlord.runtime.processes import template
from tests.runtime.roles import Probe, make_probe

MOST_BY_DEFAULT = 8 * (os.cpu_count() or 1)
NUM_THREADS = MOST_BY_DEFAULT + 8
HEAPS = """
from overlord.runtime.memory import give_threads_heaps
from tests.runtime.roles import Probe
{first}
print(Probe().num_heaps({threads}))
"""
needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="heaps are those of glibc")


@needs_glibc
@pytest.mark.parametrize("given", [False, True])
def test_every_thread_has_a_heap_where_the_process_is_ours(given):
    code = HEAPS.format(first="give_threads_heaps()" if given else "", threads=NUM_THREADS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (int(done.stdout) > MOST_BY_DEFAULT) == given


def test_giving_heaps_has_no_effect_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    give_threads_heaps()


@needs_glibc
def test_a_worker_process_has_heaps_for_its_threads_and_imports_little_that_it_does_not_share(tmp_path):
    """Every module that is imported after the fork lies in each process again."""
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 64}), tmp_path / "tokens.parquet")
    job = ol.Job(sources={"web": ol.Parquet(str(tmp_path / "tokens.parquet"))}, batch=ol.Batch(samples=4, sequence_length=8))
    with ol.start(job, engine=ol.Processes(1)) as loader:
        next(loader.client(0, timeout_s=60))
        probe = loader._roles.engine.spawn("probe", make_probe)
        imported = set(probe.call(Probe.modules).result())
        assert probe.call(Probe.num_heaps, NUM_THREADS).result() > MOST_BY_DEFAULT
    code = f"import sys, importlib\nfor name in {template._IMPORTED!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    own = {name for name in imported - set(done.stdout.split()) if name.startswith(("overlord.", "numpy.", "pyarrow."))}
    assert own <= {"overlord.loaders.routing", "overlord.runtime.whereabouts"}


def test_what_worker_processes_share_exists():
    assert all(importlib.import_module(name) for name in template._IMPORTED)
