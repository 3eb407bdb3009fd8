"""Data on the Hugging Face Hub, read by its own client from a server on loopback that speaks its interface."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.errors import SourceError, SpecError, StorageError
from overlord.sources import hub_store, object_store
from overlord.sources.object_store import Retry
from overlord.sources.storage import Storage, storage_use
from tests.hub import LFS_BYTES, Hub, hub_server

pytest.importorskip("huggingface_hub")

QUICK = Retry(deadline_s=20, first_wait_s=0.001, max_wait_s=0.002)
TABLE = pa.table({"tokens": [list(range(row % 9 + 1)) for row in range(60)]})


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub) -> Hub:
    object_store._stores.clear()
    parquet = io.BytesIO()
    pq.write_table(TABLE, parquet, row_group_size=10)
    files = {f"data/{i:02}.parquet": parquet.getvalue() for i in range(12)}
    files |= {f"data/deep/{i}.jsonl": b'{"tokens": [1, 2]}\n' * 3 for i in range(3)}
    files |= {"README.md": b"words", "large.bin": bytes(range(256)) * 8}
    server.repos = {"datasets/org/name": {"main": dict(files), "refs/pr/1": {"data/00.parquet": files["data/00.parquet"]}}}
    server.page_size, server.token, server.faults, server.num_bytes = 5, "", [], 0
    server.requests.clear()
    return server


def storage(hub: Hub, **options: str) -> Storage:
    return Storage(options=(("endpoint", hub.endpoint), *sorted(options.items())), retry=QUICK)


def test_a_source_is_listed_in_pages_and_a_read_is_one_request_and_nothing_more(hub):
    source = ol.Parquet("hf://datasets/org/name/data/*.parquet", storage_options={"endpoint": hub.endpoint})
    units = source.units()
    assert [unit.path for unit in units[::6]] == [f"hf://datasets/org/name/data/{i:02}.parquet" for i in range(12)]
    assert hub.requests.count("GET /api/datasets/org/name/tree/main/data") == 3  # twelve files and a folder, five a page
    hub.requests.clear()
    before = hub.num_bytes
    assert source.read(units[7])["tokens"].to_pylist() == TABLE["tokens"].to_pylist()[10:20]
    assert [each.split("/")[1] for each in hub.requests] == ["datasets", "lfs"]
    assert hub.num_bytes - before < 1000
    one = ol.Parquet("hf://datasets/org/name/data/00.parquet", storage_options={"endpoint": hub.endpoint})
    ol.testing.assert_source_keeps_its_promises(one)


def test_a_run_over_the_hub_is_counted_and_resumes(hub, tmp_path):
    source = ol.Parquet("hf://datasets/org/name/data/*.parquet", storage_options={"endpoint": hub.endpoint}, window=2)
    job = ol.Job(sources={"a": source}, batch=ol.Batch(samples=8, sequence_length=16), cache=ol.Cache(tmp_path, 1 << 26))
    with ol.start(job) as loader:
        client = loader.client(0)
        next(client)
        state = client.state_dict()
        expected = [micro["tokens"].tolist() for micro in next(client)]
    with ol.start(job) as loader:
        client = loader.client(0)
        client.load_state_dict(state)
        assert [micro["tokens"].tolist() for micro in next(client)] == expected
    assert storage_use()["hf://datasets"].num_bytes > 0


@pytest.mark.parametrize("path", ["README.md", "large.bin"])
def test_a_file_that_was_replaced_is_noticed_by_every_read(hub, path):
    store, files = storage(hub), hub.repos["datasets/org/name"]["main"]
    (file,) = store.list_files([f"hf://datasets/org/name/{path}"])
    assert store.read(file, 1, 4).to_pybytes() == files[path][1:4]
    files[path] = files[path][::-1]
    with pytest.raises(SourceError, match=rf"hf://datasets/org/name/{path} has changed since it was listed"):
        store.read(file, 1, 4)
    files[path] = files[path][:1]
    with pytest.raises(SourceError, match=rf"hf://datasets/org/name/{path} has changed since it was listed"):
        store.read(file, 2, 4)


def test_a_version_of_another_kind_is_looked_up_before_a_file_counts_as_changed(hub, monkeypatch):
    store = storage(hub)
    (file,) = store.list_files(["hf://datasets/org/name/README.md"])
    monkeypatch.setattr("tests.hub._git_digest", lambda data: "another kind")
    with pytest.raises(SourceError, match="has changed since it was listed: it has 5 bytes and the version another kind"):
        store.read(file, 0, 5)
    get = hub_store.HubStore._get
    monkeypatch.undo()
    monkeypatch.setattr(hub_store.HubStore, "_get", lambda *asked: (get(*asked)[0], "another kind"))
    hub.requests.clear()
    assert store.read(file, 0, 5).to_pybytes() == b"words"
    assert hub.requests[-1] == "POST /api/datasets/org/name/paths-info/main"


def test_parts_of_large_files_and_requests_of_many_threads_give_the_same_bytes(hub, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 300)
    store, data = storage(hub), hub.repos["datasets/org/name"]["main"]["large.bin"]
    assert len(data) >= LFS_BYTES
    (file,) = store.list_files(["hf://datasets/org/name/large.bin"])
    barrier = threading.Barrier(8)

    def read(start: int) -> bytes:
        barrier.wait()
        return store.read(file, start, start + 1000).to_pybytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [data[start : start + 1000] for start in range(8)]


def test_deep_patterns_revisions_and_models_are_found(hub):
    store = storage(hub)
    hub.repos["models/org/small"] = {"main": {"corpus/a.txt": b"a"}}
    found = store.list_files(["hf://datasets/org/name/**/*.jsonl"])
    assert [file.path for file in found] == [f"hf://datasets/org/name/data/deep/{i}.jsonl" for i in range(3)]
    (file,) = store.list_files(["hf://org/small/corpus/*"])
    assert store.read(file, 0, 1).to_pybytes() == b"a"
    (file,) = store.list_files(["hf://datasets/org/name@refs/pr/1/data/*.parquet"])
    assert file.path == "hf://datasets/org/name@refs/pr/1/data/00.parquet"
    assert store.read(file, 0, 4).to_pybytes() == b"PAR1"


def test_passing_faults_are_retried_and_counted_and_refusals_are_not(hub, caplog):
    store = storage(hub)
    (file,) = store.list_files(["hf://datasets/org/name/README.md"])
    hub.faults = [503, 429, 500]
    assert store.read(file, 0, 5).to_pybytes() == b"words"
    assert storage_use()["hf://datasets"].num_retries == 3
    assert "hf://datasets/org/name/README.md: attempt 3 failed, again in 0.0 s: " in caplog.text
    hub.faults = [403]
    with pytest.raises(SourceError, match=r"README\.md may not be read with these credentials: give others in storage_opt"):
        store.read(file, 0, 5)
    hub.faults = [503]
    with pytest.raises(StorageError, match=r"README\.md: storage did not answer in 1 attempts over .* \(deadline_s=0\)"):
        Storage(options=store.options, retry=Retry(deadline_s=0)).read(file, 0, 5)


def test_a_private_repository_is_read_with_a_token_and_refused_without(hub):
    hub.token = "right"
    assert len(storage(hub, token="right").list_files(["hf://datasets/org/name/data/*.parquet"])) == 12
    with pytest.raises(SourceError, match=r"README\.md does not exist: check the name, and the rights to see it"):
        storage(hub, token="wrong").list_files(["hf://datasets/org/name/README.md"])


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("datasets/org/name/none.txt", r"hf://datasets/org/name/none\.txt does not exist: check the name"),
        ("datasets/org/name/none/*.txt", r"hf://datasets/org/name/none does not exist: check the name"),
        ("datasets/org/name/data/*.txt", r"nothing matches hf://datasets/org/name/data/\*\.txt"),
        ("datasets/org/name/data", r"data is a folder: name the files in it, as in hf://datasets/org/name/data/\*"),
        ("datasets/org/none/a.txt", r"a\.txt does not exist: .* \(FileNotFoundError: .*repository not found"),
        ("datasets/org/name@v9/a.txt", r"a\.txt does not exist: .* \(FileNotFoundError: .*revision not found"),
        # Earlier releases of the client ask the server for any name.
        (
            "datasets/org/*/a.txt",
            r"is not in a repository .*: write hf://datasets/ORG/NAME/FILE, and .* globs|does not exist",
        ),
        ("datasets/a.txt", r"is not in a repository .*: write hf://datasets/ORG/NAME/FILE|does not exist"),
    ],
)
def test_what_is_not_there_is_named(hub, pattern, told):
    with pytest.raises(SourceError, match=told):
        storage(hub).list_files([f"hf://{pattern}"])


def test_a_repository_that_comes_later_is_found(hub):
    store = storage(hub)
    with pytest.raises(SourceError, match="does not exist"):
        store.list_files(["hf://datasets/org/new/a.txt"])
    hub.repos["datasets/org/new"] = {"main": {"a.txt": b"a"}}
    assert len(store.list_files(["hf://datasets/org/new/a.txt"])) == 1


def test_options_that_the_hub_does_not_have_are_refused(hub):
    with pytest.raises(SpecError, match="hf://datasets: region is no storage option of hf://, which has token and endpoint"):
        storage(hub, region="eu").list_files(["hf://datasets/org/name/README.md"])
