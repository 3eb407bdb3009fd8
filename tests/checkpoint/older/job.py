"""The job whose run an earlier release saved. Run as a program in this folder it writes the files anew: do that with the
code of the release in question, never with the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import overlord as ol
from tests.small_sources import Numbered, tokens_of

HERE = Path(__file__).parent
STEPS, CUT = 12, 5


def long_enough(table: pa.Table) -> pa.Table:
    return table.filter(pc.greater(pc.list_value_length(table["tokens"]), 2))  # pyright: ignore[reportCallIssue, reportArgumentType]


def older_job() -> ol.Job:
    """To be made with this folder as the working directory: paths count in the fingerprint of a state."""
    text = ol.Tokenize("text", encoding=ol.ByteTokenizer(), eos=7, keep=("document",))
    return ol.Job(
        sources={
            "a": Numbered(rows=40, first=1, transform=long_enough, window=2),
            "b": Numbered(rows=23, unit_rows=4, first=100, longest=16, with_mask=True, loss_mask="mask"),
            "text": ol.Jsonl("text.jsonl", columns=("text", "document"), transform=(text, ol.Pick("tokens", "document"))),
        },
        batch=ol.Batch(tokens=96, sequence_length=32),
        mixture=ol.Mixture({"a": 3, "b": 2, "text": 1}, unit="tokens"),
        seed=11,
    )


def steps_of(loader: ol.Loader, number: int) -> list[list[int]]:
    """The tokens of each step, sorted."""
    client = loader.client(0)
    return [sorted(tokens_of(next(client)).tolist()) for _ in range(number)]


def main() -> None:
    job = older_job()
    with ol.start(job, log="log") as loader:
        loader.set_weights({"a": 1, "b": 1, "text": 2}, from_step=3)
        loader.set_weights({"a": 1, "b": 5, "text": 2}, from_step=9)
        first = steps_of(loader, CUT)
        Path("state.json").write_text(json.dumps(loader.state_dict(), indent=1))
    with ol.start(job, resume=json.loads(Path("state.json").read_text())) as loader:
        Path("steps.json").write_text(json.dumps(first + steps_of(loader, STEPS - CUT)))


if __name__ == "__main__":
    main()
