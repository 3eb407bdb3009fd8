"""Where a transform runs: which chunk of which source, and the randomness that belongs to each of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True, slots=True)
class Context:
    """Handed to transforms that take a second argument.

    `stage` is the position of the transform among the transforms of its source, so that two of them do not
    draw the same numbers.
    """

    source: str
    chunk: int
    seed: int
    stage: int = 0

    def rng(self, row: int) -> np.random.Generator:
        """The generator of one row: a function of (seed, source, chunk, stage, row) and of nothing else.

        `row` is the number in the `__origin__` column of the table. Rows that an earlier transform made out
        of one row share its number, and with it their generator.
        """
        key = f"{self.seed}/{self.chunk}/{self.stage}/{row}/{self.source}".encode()
        digest = blake2b(key, digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
