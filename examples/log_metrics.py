"""Log what the loader did in every step, beside the loss: to TensorBoard, to Weights & Biases, or to standard output.

python examples/log_metrics.py                          # prints
python examples/log_metrics.py --to tensorboard         # needs torch and tensorboard; writes to ./runs
python examples/log_metrics.py --to wandb               # needs wandb; WANDB_MODE=offline keeps everything here
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol

STEPS = 20
Log = Callable[[Mapping[str, float], int], None]


@contextmanager
def to_tensorboard() -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter() as writer:

        def log(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def to_wandb() -> Iterator[Log]:
    import wandb  # pyright: ignore[reportMissingImports] - whoever runs this has it

    with wandb.init(project="overlord") as run:
        yield lambda numbers, step: run.log(dict(numbers), step=step)


@contextmanager
def to_output() -> Iterator[Log]:
    def log(numbers: Mapping[str, float], step: int) -> None:
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    yield log


LOGGERS = {"output": to_output, "tensorboard": to_tensorboard, "wandb": to_wandb}


def write_documents(path: Path) -> None:
    lengths = np.random.default_rng(0).geometric(1 / 60, 500)
    documents = [np.full(length, number % 100, np.int32) for number, length in enumerate(lengths)]
    pq.write_table(pa.table({"tokens": documents}), path, row_group_size=50)


def train(step: ol.Step) -> float:
    """Stands for the model: a loss that falls."""
    return 1 / (step.number + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", choices=LOGGERS, default="output")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LOGGERS[given.to]() as log:
        write_documents(Path(folder) / "documents.parquet")
        job = ol.Job(
            sources={"documents": ol.Parquet(f"{folder}/documents.parquet")},
            batch=ol.Batch(tokens=4096, sequence_length=512),
        )
        with ol.start(job) as loader:
            client = loader.client(0)
            for _ in range(STEPS):
                step = next(client)
                loss = train(step)
                # Numbers of this rank alone, which cost microseconds: with every step, on every rank.
                log({"loss": loss, **client.metrics()}, step.number)
            # The whole run is asked, which takes milliseconds: now and then, on one rank.
            run = client.run.metrics()
            log({f"overlord/share/{name}": source.share for name, source in run.sources.items()}, STEPS - 1)
    print(f"logged {STEPS} steps to {given.to}; rank 0 waited {run.ranks[0].waited_s:.3f} s in all")


if __name__ == "__main__":
    main()
