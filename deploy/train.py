"""A trainer that any launcher can start: reads its address, its token and its rank from the environment, and its steps from
the service. Put your training step where the tokens are counted.

    OVERLORD_ADDRESS     grpc://HOST:PORT of `overlord serve`
    OVERLORD_TOKEN_FILE  the file with the service's token, if it has one
    rank                 RANK (torchrun), SLURM_PROCID or JOB_COMPLETION_INDEX (an indexed Job of Kubernetes)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import overlord as ol


def main() -> None:
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"))
    rank = int(next((found for found in ranks if found is not None), 0))
    file = os.environ.get("OVERLORD_TOKEN_FILE")
    token = Path(file).read_text().strip() if file else None
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with ol.connect(os.environ["OVERLORD_ADDRESS"], rank=rank, token=token) as client:
        for step in client:
            tokens = sum(micro["tokens"].size for micro in step)
            print(f"rank {rank} step {step.number}: {tokens} tokens", flush=True)
            if steps is not None and step.number + 1 >= steps:
                break


if __name__ == "__main__":
    main()
