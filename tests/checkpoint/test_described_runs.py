"""A run is not resumed with other transforms, tokenizers, readers or options than it had: what a fingerprint is for."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from tests.checkpoint.describing import bpe, module_of
from tests.small_sources import Numbered, job_of, read_all, same

pytestmark = pytest.mark.strangers


@dataclass(frozen=True)
class Mapped:
    """A transform that looks tokens up."""

    table: dict = field(default_factory=dict)

    def __call__(self, table: pa.Table) -> pa.Table:
        mapped = [[self.table.get(token, token) for token in row or ()] for row in table["tokens"].to_pylist()]
        return table.set_column(0, "tokens", pa.array(mapped, pa.list_(pa.int32())))


def mapping_job(table: dict) -> ol.Job:
    return job_of({"web": Numbered(rows=40, first=1, transform=(ol.Pick("tokens"), Mapped(table)))})


def test_a_run_is_not_resumed_with_another_lookup_table():
    job = mapping_job({1000: 7})
    uncut, _ = read_all(job, 5)
    _, state = read_all(job, 3)
    assert same(read_all(mapping_job({1000: 7}), 2, resume=state)[0], uncut[3:])
    with pytest.raises(
        ol.errors.StateError, match=r"source 'web' is declared differently \(transform\[1\], Mapped: its code"
    ):
        ol.start(mapping_job({1000: 8}), resume=state)
    ol.start(mapping_job({1000: 8}), resume=state, accept_changes=["sources.web"]).close()


def test_a_run_is_not_resumed_with_another_tokenizer_file(tmp_path):
    for name, last in (("one", "b"), ("two", "c"), ("three", "b")):
        (tmp_path / name).mkdir()
        bpe(last).save(str(tmp_path / name / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"a b c {i}"}) + "\n" for i in range(50)))

    def job(name: str, kind: type = str) -> ol.Job:
        transform = ol.Tokenize(encoding=kind(tmp_path / name / "tokenizer.json"))
        return job_of({"text": ol.Jsonl(str(tmp_path / "text.jsonl"), transform=transform)})

    state = read_all(job("one"), 2)[1]
    with pytest.raises(ol.errors.StateError, match=r"transform\[0\], Tokenize"):
        ol.start(job("two"), resume=state)
    for kind in (str, Path):
        ol.start(job("three", kind), resume=state).close()  # the same file, moved


def test_a_reader_without_an_identity_counts_with_its_fields_and_code():
    @dataclass(frozen=True)
    class Silent(Numbered):
        salt: int = 0
        identity = ol.Source.identity

    state = read_all(job_of({"a": Silent(rows=20)}), 2)[1]
    ol.start(job_of({"a": Silent(rows=20)}), resume=state).close()
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(job_of({"a": Silent(rows=20, salt=1)}), resume=state)


def test_every_option_of_a_batch_counts_but_those_that_only_arrange():
    from dataclasses import fields

    from overlord.checkpoint.fingerprint import BATCH_MAY_CHANGE, Fingerprint

    job = job_of({"a": Numbered()})
    growing = job_of({"a": Numbered()}, ol.Batch(tokens=64, sequence_length=16, warm_up=ol.policies.WarmUp({0: 32, 9: 64})))
    all_fields = {each.name for each in fields(ol.Batch)}
    counted_fields = set(Fingerprint.of(growing, {"a": Numbered().units()}).batch)
    assert counted_fields == all_fields - BATCH_MAY_CHANGE
    not_given = counted_fields - set(Fingerprint.of(job, {"a": Numbered().units()}).batch)
    assert not_given == {"warm_up"}, "states of before it existed are those of jobs without it"
    state = read_all(job, 2)[1]
    limited = job_of({"a": Numbered()}, ol.Batch(tokens=64, sequence_length=16, document_limits={0: 4}))
    with pytest.raises(ol.errors.StateError, match=r"batch.document_limits was None, is \[\[0, 4\]\]"):
        ol.start(limited, resume=state)


def test_another_version_of_a_package_that_transforms_use_is_refused_by_name(tmp_path):
    from overlord.checkpoint.form import contents_of, with_checksum

    job = job_of(
        {"a": Numbered(transform=module_of(tmp_path, "import numpy as np\ndef f(t):\n    np.pi\n    return t\n").f)}
    )
    contents = contents_of(read_all(job, 1)[1])
    contents["fingerprint"]["packages"]["numpy"] = "1.26"
    with pytest.raises(
        ol.errors.StateError, match=r"numpy 1.26 was installed, is 2(?s:.*)accept_changes=\['packages.numpy'\]"
    ) as raised:
        ol.start(job, resume=with_checksum(contents))
    assert "transforms use it" in str(raised.value)


class Hidden:
    """A transform with something that nobody can look into."""

    def __init__(self) -> None:
        self.lookup = (number for number in range(3))

    def __call__(self, table: pa.Table) -> pa.Table:
        return table


def test_what_cannot_be_seen_is_said_once_at_the_first_save(caplog):
    job = job_of({"web": Numbered(transform=(ol.Pick("tokens"), Hidden()))})
    with caplog.at_level(logging.WARNING, "overlord.checkpoint"), ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        next(client)
        assert caplog.messages == []
        client.state_dict()
        client.state_dict()
        loader.state_dict()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "sources.web.transform[1].lookup is a builtins.generator, whose contents cannot be seen"
    )
    assert "give it an identity() method" in caplog.messages[0]


def test_what_cannot_be_seen_is_said_when_a_log_begins(caplog, tmp_path):
    job = job_of({"web": Numbered(transform=Hidden())})
    with caplog.at_level(logging.WARNING, "overlord.checkpoint"), ol.start(job, log=tmp_path / "log") as loader:
        loader.state_dict()
    assert len(caplog.messages) == 1
