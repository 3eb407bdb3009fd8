"""A bad document in the data, found by the losses of the run.

A small model trains for 2,000 steps on sentences of a simple language. One of 3,000 documents is damaged: it repeats letters
that follow each other nowhere else. Every time it comes, the loss jumps. `overlord spikes` compares the steps where that
happened and names the document; `overlord trace` lists the step, `overlord find` all steps that had it.

    python examples/find_bad_document.py [folder]
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol

LETTERS, STEPS, DOCUMENTS, BAD = 32, 2000, 3000, 1234

JOB = """
import overlord as ol

job = ol.Job(
    sources={{"notes": ol.Parquet({files!r}, window=2), "books": ol.Parquet({books!r}, window=2)}},
    batch=ol.Batch(samples=16, sequence_length=64),
    mixture=ol.Mixture({{"notes": 3, "books": 1}}),
    mesh=ol.Mesh(dp=2),
)
"""


def write_documents(path: Path, seed: int, bad: int | None = None) -> str:
    """Documents in which each letter is followed by one of two others."""
    rng = np.random.default_rng(seed)
    documents = []
    for number in range(DOCUMENTS):
        letters = [int(rng.integers(LETTERS))]
        for _ in range(int(rng.integers(20, 60))):
            letters.append((letters[-1] * 5 + 1 + 7 * int(rng.integers(2))) % LETTERS)
        documents.append([3, 4] * 30 if number == bad else letters)
    ids = [f"{path.stem}-{number}" for number in range(DOCUMENTS)]
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32())), "id": ids})
    pq.write_table(table, path, row_group_size=250)
    return str(path)


def train(job: ol.Job, log: Path, losses: Path) -> None:
    """Learn which letter follows which, by plain gradient descent, and write down the loss of every step."""
    logits = np.zeros((LETTERS, LETTERS))
    with ol.start(job, log=log) as loader, losses.open("w", newline="") as file:
        clients = [loader.client(rank) for rank in range(job.mesh.world_size)]
        written = csv.writer(file)
        written.writerow(["step", "loss"])
        for number in range(STEPS):
            gradient, total, loss_tokens = np.zeros_like(logits), 0.0, 1.0
            for client in clients:
                step = next(client)
                loss_tokens = step.loss_tokens
                for micro in step:
                    here = np.asarray(micro["loss_mask"])
                    before, after = np.asarray(micro["tokens"])[here], np.asarray(micro["labels"])[here]
                    chosen = logits[before]
                    chances = np.exp(chosen - chosen.max(1, keepdims=True))
                    chances /= chances.sum(1, keepdims=True)
                    total -= float(np.log(chances[np.arange(len(after)), after]).sum())
                    chances[np.arange(len(after)), after] -= 1
                    np.add.at(gradient, before, chances)
            logits -= 4.0 * gradient / loss_tokens
            written.writerow([number, total / loss_tokens])


def overlord(*arguments: object) -> str:
    command = [sys.executable, "-m", "overlord", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(folder: Path) -> None:
    files = write_documents(folder / "notes.parquet", seed=1, bad=BAD)
    books = write_documents(folder / "books.parquet", seed=2)
    path, log, losses = folder / "job.py", folder / "log", folder / "losses.csv"
    path.write_text(JOB.format(files=files, books=books))
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    train(declared["job"], log, losses)
    print(overlord("spikes", losses, "--job", path, "--log", log, "--top", 3))
    print(overlord("find", path, "--source", "notes", "--file", "notes.parquet", "--row", BAD, "--log", log))
    suspect = json.loads(overlord("spikes", losses, "--job", path, "--log", log, "--json"))["suspects"][0]
    step = suspect["spikes"][0]
    listed = json.loads(overlord("trace", path, "--step", step, "--log", log, "--json"))["documents"]
    there = [d for d in listed if (d["file"], d["row"]) == (suspect["file"], suspect["row"])]
    print(overlord("show", path, "--source", suspect["source"], "--file", suspect["file"], "--row", suspect["row"]))
    assert suspect["path"] == files
    assert suspect["file_row"] == BAD
    print(f"found row {BAD} among {len(listed)} documents of step {step}, on rank {there[0]['ranks'][0]}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
