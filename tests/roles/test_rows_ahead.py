"""Rows on other machines come for several steps in one request, and are those that single requests return."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.batches.payload import Payload
from overlord.roles.routes import Routes
from overlord.roles.rows_ahead import RowsAhead
from overlord.runtime.embedded import Immediate
from overlord.stream.facts import Samples
from tests.contract.streams import picture_file, stream, text_file
from tests.pictures import picture_documents, picture_job
from tests.roles.test_borrowed_chunks import Piped, damaged_file
from tests.small_sources import Numbered, job_of, planned


@dataclass(frozen=True)
class Measured(Numbered):
    """Documents whose number is a float: with others, a column of both is one of floats."""

    def read(self, unit: ol.Unit) -> pa.Table:
        table = super().read(unit)
        return table.set_column(2 if self.with_mask else 1, "document", table.column("document").cast(pa.float64()))


SOURCES = {"a": Numbered(first=1, with_mask=True, loss_mask="mask"), "b": Measured(first=100), "c": Numbered(first=200)}
JOB = job_of(SOURCES, ol.Batch(tokens=64, sequence_length=16, columns=("document",)))


class FarRoutes:
    """The routes of a run of which some hosts are on another machine; counts the requests for rows."""

    def __init__(self, routes: Routes, far: Iterable[str]) -> None:
        self._routes = routes
        self._far = set(far)
        self.hosts_of = routes.hosts_of
        self.num_requests = 0
        self.is_down = False

    def far_hosts(self) -> set[str]:
        return self._far

    def fetch(self, samples: Samples) -> Payload:
        self._note_request()
        return self._routes.fetch(samples)

    def fetch_apart(self, parts: list[Samples]) -> list[Payload]:
        self._note_request()
        return self._routes.fetch_apart(parts)

    def _note_request(self) -> None:
        self.num_requests += 1
        if self.is_down:
            raise ol.errors.WorkerDiedError("the host is gone")


def far_of(routes: FarRoutes, **options: Any) -> RowsAhead:
    return RowsAhead(cast("Routes", routes), has_columns=True, **options)


def parts_of(loader: ol.Loader, steps: Iterable[int]) -> list[Samples]:
    return [part for step in steps for part in planned(loader, step).plan.for_group(step, 0).all_samples()]


def content(payload: Payload) -> tuple:
    def plain(arrays: Any) -> Any:
        return None if arrays is None else [None if array is None else array.tolist() for array in arrays]

    columns = {name: (column.type, column.to_pylist()) for name, column in payload.columns.items()}
    return plain(payload.tokens), payload.following.tolist(), plain(payload.loss_masks), payload.ignored, columns


@pytest.fixture(scope="module")
def loader():
    with ol.start(JOB) as started:
        yield started


@given(first=st.integers(0, 20), num_steps=st.integers(1, 8))
def test_rows_of_several_steps_come_in_one_request_and_are_the_same(loader: ol.Loader, first: int, num_steps: int):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far = FarRoutes(routes, hosts)
    parts = parts_of(loader, range(first, first + num_steps))
    ahead = far_of(far)
    ahead.expect(parts)
    ahead.expect(parts)  # what is on its way is not requested again
    for part in parts:
        found = ahead.take(part)
        assert found is not None
        assert content(found) == content(routes.fetch(part))
    assert far.num_requests == 1
    assert ahead.take(parts[0]) is None, "it was taken"


def test_only_rows_of_other_machines_are_requested(loader: ol.Loader):
    routes = loader._roles.routes
    near = FarRoutes(routes, ())
    parts = parts_of(loader, range(4))
    ahead = far_of(near)
    ahead.expect(parts)
    assert all(ahead.take(part) is None for part in parts)
    assert near.num_requests == 0
    is_near = [part.take(np.flatnonzero(part.source == 0)) for part in parts]
    assert all(ahead.take(part) is None for part in is_near)


def test_a_request_in_vain_is_left_to_whoever_needs_the_rows(loader: ol.Loader):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far, parts = FarRoutes(routes, hosts), parts_of(loader, range(2))
    far.is_down = True
    ahead = far_of(far)
    ahead.expect(parts)
    assert [ahead.take(part) for part in parts] == [None] * len(parts)
    assert ahead.num_bytes == 0


def test_memory_is_bounded_and_what_had_no_room_is_requested_when_half_of_it_is_free(loader: ol.Loader):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far, parts = FarRoutes(routes, hosts), parts_of(loader, range(24))
    ahead = far_of(far, most_bytes=20 << 10)
    ahead.expect(parts)
    for part in parts:
        assert ahead.num_bytes <= 20 << 10
        found = ahead.take(part)
        assert found is not None, "the rows that are needed first are requested first"
        assert content(found) == content(routes.fetch(part))
    assert 2 <= far.num_requests <= len(parts) // 3
    assert ahead.num_bytes == 0
    tiny = far_of(far, most_bytes=1)
    tiny.expect(parts)
    assert [tiny.take(part) for part in parts] == [None] * len(parts)


def test_columns_that_are_larger_than_thought_make_room_from_the_end(loader: ol.Loader):
    routes = loader._roles.routes

    class Wide(FarRoutes):
        def fetch_apart(self, parts: list[Samples]) -> list[Payload]:
            wide = pa.array(["x" * 4096])
            return [
                replace(payload, columns={"document": pa.concat_arrays([wide] * len(part))})
                for part, payload in zip(parts, super().fetch_apart(parts), strict=True)
            ]

    far = Wide(routes, list(routes.hosts_of({(source, 0) for source in range(3)})))
    parts = parts_of(loader, range(6))
    ahead = far_of(far, most_bytes=80 << 10)
    ahead.expect(parts)
    found = [ahead.take(part) for part in parts]
    assert found[0] is not None
    assert found[-1] is None
    assert ahead.num_bytes <= 80 << 10


def test_rows_that_no_step_needs_any_more_are_dropped(loader: ol.Loader):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far, parts = FarRoutes(routes, hosts), parts_of(loader, range(8))
    ahead = far_of(far)
    ahead.expect(parts)
    last = parts[-1]
    ahead.release_before(np.array([last.chunk[last.source == source].min(initial=1 << 30) for source in range(3)]))
    assert ahead.take(parts[0]) is None
    assert ahead.take(last) is not None


class Apart(Piped):
    """Every loader host is on another machine than the constructors; counts the requests for rows, by their method."""

    is_one_machine = False

    def __init__(self) -> None:
        super().__init__()
        self.requests = Counter[str]()

    def shares_memory_with(self, name: str) -> bool:
        return not name.startswith("loaders")

    def call(self, name: str, method: Any, /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        if method.__name__.startswith("fetch") and name.startswith("loaders"):
            self.requests[method.__name__] += 1
        return super().call(name, method, *args, **kwargs)


def assert_few_requests(job: ol.Job, steps: int = 24) -> None:
    """The stream is that of one process, though rows come through hosts, and a request brings those of several steps."""
    with ol.start(job) as loader:
        expected = stream(loader, steps)
        num_hosts = len(loader._roles.routes.far_hosts())
    engine = Apart()
    with ol.start(job, engine=engine) as loader:
        assert stream(loader, steps) == expected
    one_by_one = num_hosts * steps * job.mesh.dp
    assert engine.requests.total() <= one_by_one * 3 // 4, engine.requests  # fewer still where plans come in time


@pytest.mark.parametrize("dp", [1, 2])
def test_small_steps_with_columns_take_few_requests_and_their_types_stay(dp: int):
    assert_few_requests(replace(JOB, mesh=ol.Mesh(dp=dp)))


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("columns", [(), ("txt",)], ids=["images", "images and columns"])
def test_small_steps_with_images_take_few_requests(tmp_path, damaged: bool, columns: tuple[str, ...]):
    path = (damaged_file if damaged else picture_file)(tmp_path / "pictures.tar", 12)
    skip = ol.policies.BadRows("skip", budget=100)
    pictures = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", None), on_bad_row=skip)
    text = ol.Parquet(text_file(tmp_path / "text.parquet", 50, 1), null_columns=("txt",))
    batch = ol.Batch(samples=5, sequence_length=64, columns=columns)
    assert_few_requests(job_of({"pictures": pictures, "text": text}, batch, mixture=ol.Mixture({"pictures": 2, "text": 1})))


def test_an_image_that_must_not_be_bad_reaches_the_trainer_from_another_machine(tmp_path):
    path = damaged_file(tmp_path / "pictures.tar", 12)
    pictures = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", (16, 16)))
    job = job_of({"pictures": pictures}, ol.Batch(samples=5, sequence_length=64))
    with ol.start(job, engine=Apart()) as loader, pytest.raises(ol.errors.DataError, match=r"pictures\.tar"):
        stream(loader, 12)


def test_pictures_that_others_encode_come_from_another_machine_for_several_steps(tmp_path):
    assert_few_requests(
        picture_job(picture_documents(tmp_path / "pictures.parquet", 40), ol.Mesh(dp=2, cp=2), "cp", samples=16)
    )
