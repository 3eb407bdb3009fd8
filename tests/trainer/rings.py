"""Rings for tests: microbatches as the loader makes them, ranks that are threads, and attention to compare with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overlord.arrange.hdp.rings import chunks_of
from overlord.trainer.ring import Ring
from overlord.trainer.ring.messages import PendingMessages, RingFacts


class Box:
    """The messages of one rank. A receive takes the message of its own number, whichever is waited for first."""

    def __init__(self) -> None:
        self._messages: list[tuple[list[Tensor], Any] | None] = []
        self._num_receives = 0
        self._changed = threading.Condition()

    def put(self, tensors: list[Tensor], sent: Any) -> None:
        with self._changed:
            self._messages.append((tensors, sent))
            self._changed.notify_all()

    def expect(self) -> int:
        """The number of a new receive. Only the rank itself calls it."""
        self._num_receives += 1
        return self._num_receives - 1

    def take(self, number: int) -> tuple[list[Tensor], Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._messages) > number, timeout=60)
            found, self._messages[number] = self._messages[number], None
        assert found is not None
        return found


@dataclass
class ThreadMessages:
    """Messages between ranks that are threads of this process."""

    boxes: dict[int, Box]

    @staticmethod
    def between(num_ranks: int) -> ThreadMessages:
        return ThreadMessages({rank: Box() for rank in range(num_ranks)})

    def exchange(self, ring: Ring, tensors: Sequence[Tensor], num_tokens: int) -> PendingMessages:
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        sent = [tensor.clone() for tensor in tensors]
        self.boxes[ring.after].put(sent, torch.cuda.current_stream().record_event() if on_gpu else None)
        own = self.boxes[ring.ranks[ring.index]]
        return ThreadPending(own, own.expect(), num_tokens)

    def check(self, ring: Ring, facts: RingFacts) -> None:
        assert facts.number == ring.number


@dataclass(frozen=True)
class ThreadPending:
    box: Box
    number: int
    num_tokens: int

    def wait(self) -> list[Tensor]:
        received, sent = self.box.take(self.number)
        if sent is not None:  # memory of the sender's stream: copied to this one's
            sent.wait()
            for tensor in received:
                tensor.record_stream(torch.cuda.current_stream())
            received = [tensor.clone() for tensor in received]
        assert [len(tensor) for tensor in received] == [self.num_tokens] * len(received)
        return received


def micro_of(wholes: list[int], num_ranks: int, part: int) -> dict[str, Any]:
    """The fields of a microbatch that a ring is made from."""
    pieces = [(whole, chunk) for whole in wholes for chunk in chunks_of(whole, num_ranks, part)]
    return {
        "hdp_ranks": np.arange(num_ranks),
        "hdp_index": part,
        "hdp_number": 0 if num_ranks > 1 else -1,
        "whole_lengths": np.array([whole for whole, _ in pieces]),
        "piece_offsets": np.array([chunk.begin for _, chunk in pieces]),
        "document_lengths": np.array([chunk.end - chunk.begin for _, chunk in pieces]),
    }


def places_of(wholes: list[int], num_ranks: int, part: int) -> list[int]:
    """Where the tokens of a rank are among those of whole documents, one after the other."""
    starts = np.cumsum([0, *wholes]).tolist()
    chunks = [
        (start, chunk) for start, whole in zip(starts, wholes, strict=False) for chunk in chunks_of(whole, num_ranks, part)
    ]
    return [start + i for start, chunk in chunks for i in range(chunk.begin, chunk.end)]


Attend = Callable[[Tensor, Tensor, Tensor, Ring], Tensor]


def run_in_threads(
    attend: Attend, wholes: list[int], num_ranks: int, tensors: list[Tensor], dout: Tensor
) -> list[list[Tensor]]:
    """Output and gradients of each rank of a ring."""
    messages = ThreadMessages.between(num_ranks)

    def run(part: int) -> list[Tensor]:
        ring = Ring.of(micro_of(wholes, num_ranks, part)).with_messages(messages)
        places = places_of(wholes, num_ranks, part)
        own = [tensor[places].requires_grad_() for tensor in tensors]
        out = attend(own[0], own[1], own[2], ring)
        out.backward(dout[places])
        return [out.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    """Causal attention of each document alone, with a sliding window where one is given."""
    outs = []
    for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        shared = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        place = torch.arange(len(queries), device=q.device)
        far = place[:, None] - place[None]
        hidden = (far < 0) if window is None else (far < 0) | (far > window)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[2] ** 0.5
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outs) if outs else q


def random_numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
