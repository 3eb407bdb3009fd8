"""Train a small Llama with hybrid data parallelism: long documents over several ranks, short ones whole.

    torchrun --nproc-per-node 4 examples/long_context_llama.py
    torchrun --nproc-per-node 4 examples/long_context_llama.py --plain    # the same documents, rows dealt to ranks
    torchrun --nproc-per-node 4 examples/long_context_llama.py --fsdp     # weights sharded too, by FSDP2

With GPUs it runs on NCCL, in bfloat16 and on flash attention; without, on gloo. All three commands print the same losses and
gradient norms, up to rounding: a step has the same documents, and its loss is one sum over their tokens. Without `--fsdp`
ranks run different numbers of microbatches and sum gradients once per step (ZeRO-1). FSDP2 gathers weights in every
microbatch, so there all ranks run the same number.

With `--corpus FOLDER --checkpoint FILE` a run that ended, or was killed, goes on at its last checkpoint, also on another
number of ranks.
"""

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import rms_norm, silu

import overlord as ol
from overlord.trainer import (
    GradientSums,
    OffloadedLayers,
    Ring,
    Rotary,
    attach,
    chunked_token_loss,
    ring_attention,
)

WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 64, 4, 2, 4, 256
CONTEXT, CAPACITY = 1024, 256


def write_corpus(folder: Path) -> None:
    """Python files, the long ones much longer than what one rank holds."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_text("utf-8")[:CONTEXT] for path in sorted(library.glob("*.py"))[:60]]
    code += [text[: 60 + 7 * i] for i, text in enumerate(code * 3)]
    pq.write_table(pa.table({"text": code}), folder / "code.parquet", row_group_size=20)


def declare(folder: Path, options: argparse.Namespace) -> ol.Job:
    cost = ol.TransformerCost(per_token=1.0, per_length_squared=1e-3)
    # A document may be twice as long as a rank's memory holds if half of its activations are moved to the host.
    layer_time = ol.TransformerCost(per_token=1e-6, per_length_squared=1e-9)
    offload = ol.hdp.Offload(layers=LAYERS, time=layer_time, bytes_per_token=12 * WIDTH * 4, bytes_per_s=50e9)
    if options.plain:
        strategy = ol.strategies.plain()
    elif options.fsdp:
        strategy = ol.strategies.hdp(cost, capacity=2 * CAPACITY, equal_counts=True)
    else:
        strategy = ol.strategies.hdp(cost, capacity=CAPACITY, offload=offload)
    return ol.Job(
        sources={"code": ol.Parquet(f"{folder}/code.parquet", transform=ol.Tokenize("text", encoding=ol.ByteTokenizer()))},
        mixture=ol.Mixture({"code": 1}),
        batch=ol.Batch(tokens=4 * CONTEXT, sequence_length=CONTEXT),
        mesh=ol.Mesh(),
        strategy=strategy,
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.rotary = Rotary(self.head_dim)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], ring: Ring) -> Tensor:
        heads = self.qkv(rms_norm(x, (WIDTH,))).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = ring_attention(self.rotary.rotate(q, angles), self.rotary.rotate(k, angles), v, ring)
        x = x + self.out(attended.reshape(len(x), WIDTH))
        gate, up = self.gate_up(rms_norm(x, (WIDTH,))).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.rotary = Rotary(WIDTH // HEADS)

    def forward(self, micro: Mapping[str, Any], ring: Ring, loss_tokens: float) -> Tensor:
        """The loss of a microbatch."""
        x = self.embedding(micro["tokens"])
        angles = self.rotary.angles(micro["position_ids"], x.dtype)
        if "offload_ratios" in micro:
            layers = OffloadedLayers.of(micro, LAYERS, capacity=self.capacity, shared=angles)
            layers.least_bytes = 0  # this model is small; the default leaves tensors below a megabyte where they are
        else:
            layers = OffloadedLayers(0.0, LAYERS)
        for index, layer in enumerate(self.layers):
            x = layers.run(index, layer, x, angles, ring)
        return chunked_token_loss(rms_norm(x, (WIDTH,)), self.head.weight, micro["labels"], loss_tokens)


class Zero1:
    """Every rank has all weights and a part of the optimizer's state. Gradients are summed once per step."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
        self.sums = GradientSums(model.parameters(), dtype=torch.float32)  # also for weights in bfloat16

    def backward(self, loss: Tensor, is_last: bool, ring: Ring) -> None:
        self.sums.backward(loss, is_last=is_last, ring=ring)

    def finish(self) -> None:
        self.sums.finish()

    def state(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(to=0)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict() if dist.get_rank() == 0 else None,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Fsdp:
    """Every rank has a part of the weights. They are gathered, in `dtype`, and gradients summed in every microbatch. Weights
    are kept, and gradients summed, in single precision at least."""

    def __init__(self, model: Llama, dtype: torch.dtype) -> None:
        exact = torch.promote_types(dtype, torch.float32)
        model.to(exact)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=exact)
        for module in (*model.layers, model):
            sharded = fully_shard(module, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by the tokens of the whole step already
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def backward(self, loss: Tensor, *_: object) -> None:
        loss.backward()

    def finish(self) -> None: ...

    def state(self) -> dict[str, Any]:
        model, optimizer = dcp.get_state_dict(self.model, self.optimizer, options=dcp.StateDictOptions(full_state_dict=True))
        return {"model": model, "optimizer": optimizer}

    def load(self, saved: dict[str, Any]) -> None:
        options = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=options,
        )


def train(job: ol.Job, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Llama(2 * CAPACITY if options.fsdp else CAPACITY).to(device, dtype)
    shards = Fsdp(model, dtype) if options.fsdp else Zero1(model)
    saved = torch.load(options.checkpoint) if options.checkpoint and options.checkpoint.exists() else None
    if saved is not None:
        shards.load(saved)
    with attach(job, resume=saved and saved["data"], device=device if device.type == "cuda" else None) as client:
        while client.step < options.steps:
            step = next(client)
            loss = torch.zeros((), dtype=torch.float64, device=device)
            for index, micro in enumerate(step):
                ring = Ring.of(micro) if "hdp_ranks" in micro else Ring.alone(micro)
                part = model(micro, ring, step.loss_tokens)
                shards.backward(part, index + 1 == len(step), ring)
                loss += part.detach()
            shards.finish()
            dist.all_reduce(loss)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            shards.optimizer.step()
            shards.optimizer.zero_grad()
            cut = [micro for micro in step if "hdp_ranks" in micro]
            rings = max((len(micro["hdp_ranks"]) for micro in cut), default=1)
            moved = max((float(micro["offload_ratios"].max()) for micro in cut if "offload_ratios" in micro), default=0.0)
            line = {"step": step.number, "loss": loss.item(), "gradient_norm": norm.item()}
            line |= {"largest_ring": rings, "most_moved": moved}  # on this rank
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
            if options.checkpoint and (client.step % options.save_every == 0 or client.step == options.steps):
                save(shards.state() | {"data": client.state_dict()}, options.checkpoint)
        dist.barrier()


def save(state: dict[str, Any], path: Path) -> None:
    """Rank 0 writes; a process that is killed meanwhile leaves the checkpoint before."""
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="deal rows to ranks instead")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights by FSDP2; activations are not moved then")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--corpus", type=Path, help="write the documents here, to find them again when continuing")
    parser.add_argument("--checkpoint", type=Path, help="continue from this file if it is there, and write it")
    parser.add_argument(
        "--save-every", type=int, default=4, help="steps between two checkpoints; the last one is at the end"
    )
    parser.add_argument("--double", action="store_true", help="double precision, to compare runs")
    options = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    # Messages run beside kernels; on a stream of normal priority they would wait for those that were started before them.
    priority = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if is_gpu else None
    dist.init_process_group("nccl" if is_gpu else "gloo", pg_options=priority)
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.barrier()  # NCCL: point-to-point must not be the first call on a group
    dtype = torch.float64 if options.double else torch.bfloat16 if is_gpu else torch.float32
    with tempfile.TemporaryDirectory() as name:
        folder = options.corpus or Path(name)
        if not (folder / "code.parquet").exists() and (options.corpus is None or dist.get_rank() == 0):
            write_corpus(folder)
        train(declare(folder, options), options, device, dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
