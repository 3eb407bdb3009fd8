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
from overlord.runtime.embedded import Embedded
from overlord.runtime.engine import EarlyLoad, WorkplaceSize
from overlord.runtime.memory import give_threads_heaps
from overlord.runtime.processes import template
from overlord.service.run import _early_loads
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


def loaded_in_workers(*names: str) -> tuple[list[str], set[int]]:
    """What two worker processes have loaded, and the processes that did."""
    engine = ol.Processes(2)
    engine.open(WorkplaceSize(1, 1), [EarlyLoad("tests.runtime.roles", "load", (name,)) for name in names])
    try:
        probes = [engine.spawn(f"probe/{i}", make_probe) for i in range(2)]
        first, second = [probe.call(Probe.loaded).result() for probe in probes]
        assert first == second
        return [name for name, _ in first], {process for _, process in first}
    finally:
        engine.close()


def test_worker_processes_share_what_their_template_has_loaded_once():
    names, processes = loaded_in_workers("one", "broken", "other")
    assert names == ["one", "broken", "other"]
    assert len(processes) == 1
    assert os.getpid() not in processes


@pytest.mark.parametrize("name", ["threaded", "deadly"])
def test_a_template_that_what_it_loads_has_spoiled_is_replaced_by_one_that_loads_nothing(name):
    assert loaded_in_workers("one", name) == ([], set())


def test_a_tokenizer_file_is_loaded_once_for_all_processes_that_encode_with_it(tmp_path):
    file = tmp_path / "tokenizer.json"
    plain, special = ol.Tokenize(encoding=file), ol.Tokenize(encoding=str(file), special_tokens=True)
    transforms = {
        "a": [plain],
        "b": [str, ol.Tokenize(encoding=str(file))],
        "c": [special, ol.Tokenize(encoding="gpt2")],
        "d": [ol.Tokenize(encoding=list), ol.Tokenize(encoding=ol.ByteTokenizer())],
    }
    job = ol.Job(
        sources={name: ol.Parquet(str(file), transform=listed) for name, listed in transforms.items()},
        batch=ol.Batch(samples=4, sequence_length=8),
    )
    found = [load.arguments for load in _early_loads(job, ol.Processes())]
    assert found == [(str(file), False, None), (str(file), True, None)]
    assert not _early_loads(job, Embedded())


def test_what_worker_processes_share_exists():
    assert all(importlib.import_module(name) for name in template._IMPORTED)
