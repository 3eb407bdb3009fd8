"""The order of rows and units: the bits of a counter-based generator, whoever drew from it before."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.source import Unit
from overlord.stream.chunk_order import MOST_LANES, UnitRuns, chunks_per_epoch, row_order, units_of_chunk


def from_a_new_generator(seed: int, source: str, chunk: int, num_rows: int) -> list[int]:
    digest = hashlib.blake2b(f"rows\0{seed}\0{source}\0{chunk}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(num_rows)
    return np.argsort(raw, kind="stable").tolist()


@given(st.integers(0, 2**64), st.text(max_size=8), st.integers(0, 10**9), st.integers(0, 70))
def test_rows_come_in_the_order_of_the_bits_of_philox(seed, source, chunk, num_rows):
    assert row_order(seed, source, chunk, num_rows).tolist() == from_a_new_generator(seed, source, chunk, num_rows)


def test_threads_that_draw_at_once_do_not_disturb_each_other():
    asked = [(seed, f"s{seed % 3}", seed, 200 + seed % 17) for seed in range(400)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: row_order(*each).tolist(), asked))
    assert found == [from_a_new_generator(*each) for each in asked]


def epoch_of(units: UnitRuns, window: int, shuffle: bool, epoch: int) -> list[int]:
    per_epoch = chunks_per_epoch(units.num_units, window)
    chunks = [
        units_of_chunk(1, "s", units, window=window, shuffle=shuffle, chunk=epoch * per_epoch + i) for i in range(per_epoch)
    ]
    return np.concatenate(chunks).tolist()


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_unit_once(num_units, window, shuffle, epoch):
    assert sorted(epoch_of(UnitRuns(num_units), window, shuffle, epoch)) == list(range(num_units))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 7), st.integers(0, 3))
def test_units_that_follow_each_other_stay_in_order_and_few_runs_are_read_side_by_side(lengths, window, epoch):
    run_of = np.repeat(np.arange(len(lengths)), lengths)
    listed = [Unit("a", follows=bool(i) and run_of[i] == run_of[i - 1]) for i in range(len(run_of))]
    order = epoch_of(UnitRuns.of(listed), window, True, epoch)
    assert sorted(order) == list(range(len(run_of)))
    is_open: dict[int, int] = {}
    for unit in order:
        run = int(run_of[unit])
        begun = is_open.setdefault(run, int(np.flatnonzero(run_of == run)[0]))
        assert unit == begun
        is_open[run] += 1
        if is_open[run] == begun + 1 and (run_of == run).sum() == is_open[run] - np.flatnonzero(run_of == run)[0]:
            del is_open[run]
        assert len(is_open) <= MOST_LANES


@given(st.integers(1, 40), st.integers(0, 3))
def test_units_by_themselves_come_in_the_order_of_earlier_releases(num_units, epoch):
    digest = hashlib.blake2b(f"units\0{1}\0s\0{epoch}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(num_units)
    units = UnitRuns.of([Unit("a", i) for i in range(num_units)])
    assert epoch_of(units, 1, True, epoch) == np.argsort(raw, kind="stable").tolist()


def test_neighbours_are_of_different_files():
    units = UnitRuns(160, (20,) * 8)
    order = np.array(epoch_of(units, 4, True, 0)) // 20
    assert all(len(set(order[i : i + 4].tolist())) == 4 for i in range(0, 160, 4))
