"""Stop a run on four ranks and go on with six: the stream does not notice.

python examples/resume_on_new_mesh.py
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol

PAD = -1


def write_documents(path: Path) -> None:
    """500 documents of very different lengths; document d is made of the number d alone, so that batches tell tales."""
    lengths = np.random.default_rng(0).geometric(1 / 60, 500)
    documents = [np.full(length, number, np.int32) for number, length in enumerate(lengths)]
    pq.write_table(pa.table({"tokens": documents}), path, row_group_size=50)


def documents_of_steps(loader: ol.Loader, num_steps: int) -> list[list[int]]:
    """Read every rank's part of the next steps. Gives the tokens of each step over all ranks, sorted."""
    clients = [loader.client(rank) for rank in range(loader.job.mesh.world_size)]
    steps = []
    for _ in range(num_steps):
        parts = [micro["tokens"] for client in clients for micro in next(client)]
        tokens = np.concatenate(parts)
        steps.append(np.sort(tokens[tokens != PAD]).tolist())
    return steps


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder) / "documents.parquet")
        job = ol.Job(
            sources={"documents": ol.Parquet(f"{folder}/documents.parquet")},
            batch=ol.Batch(tokens=4096, sequence_length=512, pad_token=PAD),
            mesh=ol.Mesh(dp=2, cp=2),
            strategy=ol.strategies.long_short(ol.TransformerCost.of(hidden=1024, layers=12)),
        )
        with ol.start(job) as loader:
            uncut = documents_of_steps(loader, 20)

        with ol.start(job) as loader:
            before = documents_of_steps(loader, 8)
            # Any rank may write the checkpoint: the state is the same on all, and it says nothing about the mesh.
            checkpoint = json.dumps(loader.state_dict())
        print(f"stopped before step 8 on {job.mesh.world_size} ranks; the state takes {len(checkpoint)} bytes")

        # Which samples make a step was settled by mixture and batch alone, so a new mesh only deals them out anew.
        larger = replace(job, mesh=ol.Mesh(dp=3, cp=2))
        with ol.start(larger, resume=json.loads(checkpoint)) as loader:
            after = documents_of_steps(loader, 12)
        assert before + after == uncut, "the resumed stream must be the one never stopped"
        print(f"resumed on {larger.mesh.world_size} ranks: all 20 steps hold the documents of the run never stopped")


if __name__ == "__main__":
    main()
