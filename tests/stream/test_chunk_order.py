"""The order of rows and units: the bits of a counter-based generator, whoever drew from it before."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.stream.chunk_order import chunks_per_epoch, row_order, units_of_chunk


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


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_unit_once(num_units, window, shuffle, epoch):
    per_epoch = chunks_per_epoch(num_units, window)
    chunks = [
        units_of_chunk(1, "s", num_units, window=window, shuffle=shuffle, chunk=epoch * per_epoch + i)
        for i in range(per_epoch)
    ]
    assert sorted(np.concatenate(chunks).tolist()) == list(range(num_units))
