"""Length curricula: how long the parts of documents may be, by step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from overlord.errors import SpecError


def check_limits(limits: Mapping[int, int], tokens: int | None, sequence_length: int, document_multiple: int) -> None:
    """Refuse what is not {step: tokens}, and batches of `tokens` a step (None: of samples) that it makes no sense for."""
    if tokens is None:
        raise SpecError("document_limits cuts documents into several samples: count steps in tokens=...")
    if not limits or min(limits) != 0:
        raise SpecError(f"document_limits is {{step: tokens}} and begins at step 0, got {dict(limits)}")
    for step, limit in limits.items():
        if not 1 <= limit <= sequence_length:
            raise SpecError(
                f"document_limits are from 1 to sequence_length ({sequence_length}) tokens, got {limit} at step {step}"
            )
        if limit % document_multiple:
            raise SpecError(
                f"document_limits must be multiples of document_multiple: {limit} at step {step} is not one of "
                f"{document_multiple}"
            )


def limit_at(limits: Mapping[int, int], step: int) -> int:
    starts = sorted(limits)
    return limits[starts[bisect_right(starts, step) - 1]]
