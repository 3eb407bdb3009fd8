"""A function of a CUDA tensor that is captured as a CUDA graph for each new shape, and replayed from then on.

Launching thousands of small kernels one by one costs far more than running them. A captured graph keeps its own memory: a
copy of the input, and the intermediate results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    given: Tensor
    answer: Tensor


class CudaGraphed:
    """Wraps `function(tensor, number)`, whose control flow must depend on the shape and the number alone."""

    def __init__(self, function: Callable[[Tensor, int], Tensor]) -> None:
        self._function = function
        self._recordings: dict[tuple[torch.Size, torch.dtype, torch.device, int], _Recording] = {}

    def __call__(self, tensor: Tensor, number: int) -> Tensor:
        key = (tensor.shape, tensor.dtype, tensor.device, number)
        if key not in self._recordings:
            self._recordings[key] = self._record(tensor, number)
        recording = self._recordings[key]
        recording.given.copy_(tensor)
        recording.graph.replay()
        return recording.answer.clone()

    def _record(self, tensor: Tensor, number: int) -> _Recording:
        with torch.cuda.device(tensor.device):
            self._function(tensor[:1].clone(), number)  # libraries allocate their workspaces now, not during capture
            torch.cuda.synchronize()
            given = tensor.clone()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as a loader that pins memory, may call CUDA during capture
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                answer = self._function(given, number)
        return _Recording(graph, given, answer)
