"""Pre-train a small language model on CPU: two sources, packed batches, a stop in the middle, and on from there.

python examples/text_pretraining_torch.py
"""

import json
import pydoc_data.topics
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlord as ol

STEPS, STOP_AFTER = 40, 20


def write_corpus(folder: Path) -> None:
    """Code as Parquet and prose as JSON lines: text that every machine with Python has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_text("utf-8") for path in sorted(library.glob("*.py"))[:40]]
    pq.write_table(pa.table({"text": code}), folder / "code.parquet", row_group_size=10)
    prose = (json.dumps({"text": text}) + "\n" for text in pydoc_data.topics.topics.values())
    (folder / "prose.jsonl").write_text("".join(prose), "utf-8")


def declare(folder: Path) -> ol.Job:
    # Bytes need no vocabulary. A real job names a tiktoken encoding or a tokenizer.json, and its end-of-text id as eos.
    tokenize = ol.Tokenize("text", encoding=ol.ByteTokenizer())
    return ol.Job(
        sources={
            "code": ol.Parquet(f"{folder}/code.parquet", transform=tokenize),
            "prose": ol.Jsonl(f"{folder}/prose.jsonl", transform=tokenize),
        },
        mixture=ol.Mixture({"code": 3, "prose": 1}, unit="tokens"),
        # A step is 1,024 tokens whatever the number of ranks; each microbatch holds about 512 of them.
        batch=ol.Batch(tokens=1024, sequence_length=256, micro_tokens=512),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).reshape(x.shape))
        return x + self.mlp(self.before_mlp(x))


class TinyModel(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 48, longest: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        # Documents lie one after the other. A position of 0 begins the next one, and no token may look past it. On a GPU
        # `cu_seqlens` and `max_seqlen` of the microbatch say the same to a varlen attention kernel.
        document = (position_ids == 0).cumsum(0)
        mask = (document[:, None] == document[None, :]).tril()
        x = self.tokens(tokens) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def train(job: ol.Job, checkpoint: Path, until: int) -> list[float]:
    """Train up to a step, from the checkpoint if there is one, and leave a new one. Gives the loss of each step."""
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = torch.load(checkpoint) if checkpoint.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    losses = []
    with ol.start(job, resume=saved and saved["data"]) as loader:
        client = loader.client(rank=0, torch=True)
        while client.step < until:
            step = next(client)
            loss = torch.zeros(())
            for micro in step:
                logits = model(micro["tokens"], micro["position_ids"])
                summed = F.cross_entropy(logits, micro["labels"], ignore_index=-100, reduction="sum")
                # Divided by the loss tokens of the whole step over all ranks, the gradient is right however the step was
                # arranged: with several ranks, add gradients up, do not average them.
                part = summed / step.loss_tokens
                part.backward()
                loss += part.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        # The loader's state is a small dict of numbers and strings; keep it beside the model's.
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}, checkpoint
        )
    return losses


def main() -> None:
    torch.set_num_threads(1)  # the model is too small to share
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        job, checkpoint = declare(folder), folder / "checkpoint.pt"
        losses = train(job, checkpoint, until=STOP_AFTER)
        print(f"stopped at step {STOP_AFTER}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
        losses += train(job, checkpoint, until=STEPS)
        print(f"resumed to step {STEPS}: loss {losses[STOP_AFTER]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
