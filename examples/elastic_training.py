"""Four trainers, of which one is killed and comes back: they go on with three, then with four, and learn the same.

python examples/elastic_training.py

Every step has the same documents and the same number of loss tokens, whoever is there, so the global batch is constant. The
losses are those of a run that nobody disturbed, up to the rounding of sums in float64. Needs torch.
"""

import json
import multiprocessing
import multiprocessing.process
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import overlord as ol
from overlord.errors import ClosedError
from overlord.trainer import token_loss

Snapshots = dict[int, list[torch.Tensor]]
"""The tensors of a model by the step that they are from before."""

VOCABULARY, WIDTH, LEARNING_RATE, MOMENTUM = 64, 16, 0.5, 0.9
LEAVE_AFTER_S = 3.0


class Model:
    """Predicts a token from the one before it, with momentum: its tensors are all that a trainer has to keep."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((VOCABULARY, WIDTH), (WIDTH, VOCABULARY))
        self.weights = [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 for shape in shapes]
        self.velocity = [torch.zeros_like(weight) for weight in self.weights]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.weights, *self.velocity]

    def load(self, tensors: list[torch.Tensor]) -> None:
        for own, saved in zip(self.tensors(), tensors, strict=True):
            own.copy_(saved)

    def loss_and_gradients(self, step: ol.Step) -> list[torch.Tensor]:
        """This rank's part of the step's loss and of its gradients: sums over ranks are those of the whole step."""
        weights = [weight.clone().requires_grad_() for weight in self.weights]
        loss = torch.zeros((), dtype=torch.float64)
        for micro in step:
            hidden = weights[0][micro["tokens"].long()]
            loss = loss + token_loss(hidden @ weights[1], micro["labels"], step.loss_tokens)
        gradients = torch.autograd.grad(loss, weights) if loss.requires_grad else map(torch.zeros_like, weights)
        return [loss.detach(), *gradients]

    def learn(self, gradients: list[torch.Tensor]) -> None:
        for weight, velocity, gradient in zip(self.weights, self.velocity, gradients, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
            weight.sub_(velocity, alpha=LEARNING_RATE)


def train(declared: int, address: str, port: int, losses: Path) -> None:
    """One trainer. `declared` is its rank in the mesh that the run is served with."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    model = Model()
    before = {0: copies(model)}  # the model from before the last step and from after it, by the step that it is from before
    with ol.join(address, rank=declared, torch=True) as member:
        while True:
            try:
                open_group(store, member.seat)
                agree(model, before, member.seat.step)
                read(store, member, model, before, losses)
                return
            except (ClosedError, RuntimeError) as error:  # the mesh has changed, or a peer is gone
                print(f"trainer {declared}: {str(error).splitlines()[0][:100]}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
            seat = member.regroup()
            print(f"trainer {declared}: rank {seat.rank} of {seat.world_size} from step {seat.step} on", flush=True)


def open_group(store: Store, seat: ol.Seat) -> None:
    # The number of the seat is the same for all trainers of this mesh, and no other mesh has it.
    prefixed = PrefixStore(seat.number, store)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=prefixed, rank=seat.rank, world_size=seat.world_size, timeout=timeout)


def agree(model: Model, before: Snapshots, step: int) -> None:
    """Let every trainer have the model from before a step: those that were there have kept it, the others get it."""
    has_it = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(has_it, torch.tensor([int(step in before)]))
    source = [bool(flag.item()) for flag in has_it].index(True)
    if step in before:
        model.load(before[step])
    for tensor in model.tensors():
        dist.broadcast(tensor, source)


def read(store: Store, member: ol.ElasticClient, model: Model, before: Snapshots, losses: Path) -> None:
    """Train until the mesh changes or the last step is done."""
    for step in member:
        if store.check(["last"]) and step.number > int(store.get("last")):
            return
        loss, *gradients = model.loss_and_gradients(step)
        for tensor in (loss, *gradients):
            dist.all_reduce(tensor)
        model.learn(gradients)
        before[step.number + 1] = copies(model)
        for old in [number for number in before if number < step.number]:
            del before[old]
        if member.seat.rank == 0:
            with losses.open("a") as file:
                file.write(json.dumps([step.number, member.seat.world_size, loss.item()]) + "\n")
        time.sleep(0.02)  # larger models take longer


def copies(model: Model) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.tensors()]


def undisturbed(job: ol.Job, num_steps: int) -> list[float]:
    """The losses of the same job, all four ranks in this process."""
    model, found = Model(), []
    with ol.start(job) as loader:
        clients = [loader.client(rank, torch=True) for rank in range(job.mesh.world_size)]
        for _ in range(num_steps):
            parts = [model.loss_and_gradients(next(client)) for client in clients]
            loss, *gradients = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*parts, strict=True)]
            model.learn(gradients)
            found.append(loss.item())
    return found


def disturb(job: ol.Job, folder: Path) -> dict[int, tuple[int, float]]:
    """Train with four processes, kill one, and start it again; returns the ranks and the loss of each step."""
    losses, processes = folder / "losses.jsonl", multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch.distributed", "pyarrow.parquet", "overlord.trainer"])  # imported once for all
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ol.start(job) as loader:
        address = loader.serve(leave_after_s=LEAVE_AFTER_S, resize_on_leave=True)

        def launch(rank: int) -> multiprocessing.process.BaseProcess:
            trainer = processes.Process(target=train, args=(rank, address, store.port, losses), daemon=True)
            trainer.start()
            return trainer

        trainers = [launch(rank) for rank in range(4)]
        wait_for(lambda: len(read_losses(losses)) >= 10)
        print(f"killing trainer 1 at about step {max(read_losses(losses))}", flush=True)
        os.kill(trainers[1].pid or 0, signal.SIGKILL)
        wait_for(lambda: sum(size == 3 for size, _ in read_losses(losses).values()) >= 10)
        print(f"starting trainer 1 again at about step {max(read_losses(losses))}", flush=True)
        away = max(read_losses(losses))
        trainers[1] = launch(1)
        wait_for(lambda: sum(size == 4 for step, (size, _) in read_losses(losses).items() if step > away) >= 10)
        store.set("last", str(max(read_losses(losses)) + 20))
        for trainer in trainers:
            trainer.join(120)
            assert trainer.exitcode == 0, f"a trainer ended with {trainer.exitcode}"
    return read_losses(losses)


def read_losses(path: Path) -> dict[int, tuple[int, float]]:
    """Step to the number of ranks and the loss. A step that was done again counts as it was done last."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {step: (size, loss) for step, size, loss in map(json.loads, lines)}


def wait_for(holds: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "the trainers do not get on"
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)  # the model is small
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        # Each document repeats a pattern of its own, so that there is something to learn.
        documents = [
            np.tile(generator.integers(0, VOCABULARY, 5), 40)[: generator.integers(8, 200)].astype(np.int32)
            for _ in range(400)
        ]
        pq.write_table(pa.table({"tokens": documents}), f"{folder}/documents.parquet", row_group_size=50)
        job = ol.Job(
            sources={"documents": ol.Parquet(f"{folder}/documents.parquet")},
            batch=ol.Batch(tokens=4096, sequence_length=256),
            mesh=ol.Mesh(dp=4),
            strategy=ol.strategies.long_short(ol.TransformerCost.of(hidden=1024, layers=12)),
        )
        found = disturb(job, Path(folder))
        steps = sorted(found)
        assert steps == list(range(len(steps))), "no step was left out"
        expected = undisturbed(job, len(steps))
        apart = max(abs(found[step][1] - expected[step]) for step in steps)
        assert apart < 1e-10, f"the losses are up to {apart:.1e} from those of the undisturbed run"
        sizes = [found[step][0] for step in steps]
        runs = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
        print(f"{len(steps)} steps on {' -> '.join(map(str, runs))} ranks: loss {expected[0]:.3f} to {expected[-1]:.3f}")
        print("the loss of every step is that of the undisturbed run, to 1e-10")


if __name__ == "__main__":
    main()
