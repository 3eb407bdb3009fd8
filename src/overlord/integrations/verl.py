"""Prompts for reinforcement learning: verl, GRPO trainers, or a rollout loop of your own.

`Prompts(client)` turns the steps of a job into batches of prompts: token ids, padded on the left as rollouts take them, and
the columns of the job, in the form of verl's `DataProto.from_single_dict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlord.messages import Step
    from overlord.service.client import Client


class Prompts:
    """Iterates over the prompts of this rank, a dict for every step of a job with `Batch(samples=...)`.

    `input_ids`, `attention_mask` and `position_ids` are int64 [prompts, width], padded on the left to the longest prompt or
    to `max_length`. `raw_prompt_ids` are the ids without padding, `uid` names each prompt by step and place, equal for its
    `repeats` rollouts, and `index` is its place in the step. `Batch(columns=...)` are there under their names: ground truths
    or names of rewards. `state_dict` is that of the client: save it with the policy.
    """

    def __init__(self, client: Client, *, pad_token: int, max_length: int | None = None, repeats: int = 1) -> None:
        if repeats < 1:
            raise SpecError(f"repeats is how many rollouts each prompt gets, at least 1, got {repeats}")
        self.client = client
        self._pad_token, self._max_length, self._repeats = pad_token, max_length, repeats

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self.client:
            yield self.batch_of(step)

    def __len__(self) -> int:
        return len(self.client)

    def state_dict(self) -> Mapping[str, Any]:
        return self.client.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.client.load_state_dict(state)

    def batch_of(self, step: Step) -> dict[str, Any]:
        """The prompts of one step on this rank."""
        import torch

        prompts = [prompt for micro in step for prompt in _documents(micro)]
        width = self._max_length or max((len(prompt) for prompt in prompts), default=1)
        for index, prompt in enumerate(prompts):
            if len(prompt) > width:
                raise SpecError(
                    f"prompt {index} of step {step.number} has {len(prompt)} tokens, more than max_length={width}: declare "
                    f"Batch(sequence_length={width}, long_documents='drop')"
                )
        ids = np.full((len(prompts), width), self._pad_token, np.int64)
        mask = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        columns = _columns(step)
        found: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0)),
            "raw_prompt_ids": _objects(prompts),
            "index": np.arange(len(prompts)),
            "uid": _objects([f"{step.number}-{self.client.rank}-{index}" for index in range(len(prompts))]),
            **{name: _objects(values) for name, values in columns.items()},
        }
        return {name: _repeated(value, self._repeats) for name, value in found.items()}


def _documents(micro: Mapping[str, Any]) -> list[list[int]]:
    tokens = np.asarray(micro["tokens"]).reshape(-1)
    if "attention_mask" in micro:
        rows, masks = np.asarray(micro["tokens"]), np.asarray(micro["attention_mask"]).astype(bool)
        return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True) if mask.any()]
    starts, lengths = np.asarray(micro["document_starts"]), np.asarray(micro["document_lengths"])
    return [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]


def _columns(step: Step) -> dict[str, list[Any]]:
    import pyarrow as pa

    found: dict[str, list[Any]] = {}
    for micro in step:
        for name, value in micro.items():
            if isinstance(value, (pa.Array, pa.ChunkedArray)):
                found.setdefault(name, []).extend(value.to_pylist())
    return found


def _objects(values: list[Any]) -> Any:
    """An array of objects of one dimension, as verl's DataProto has them."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _repeated(value: Any, repeats: int) -> Any:
    if repeats == 1:
        return value
    return value.repeat_interleave(repeats, dim=0) if hasattr(value, "repeat_interleave") else np.repeat(value, repeats)
