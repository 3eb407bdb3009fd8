"""Ring attention: documents that are cut over ranks (`strategies.hdp`), on fused kernels where there are any.

`pieces` says what each rank has, `schedule` who attends to whom in each turn, `kernels` computes it, `merging` puts outputs
together, `messages` carries keys, values and their gradients, and `attention` joins all of them.
"""

from overlord.trainer.ring.attention import ring_attention
from overlord.trainer.ring.kernels import FlashAttn, Kernel, ReferenceKernel, TorchFlash
from overlord.trainer.ring.messages import GroupMessages, Messages, RingFacts
from overlord.trainer.ring.pieces import Piece, Ring

__all__ = [
    "FlashAttn",
    "GroupMessages",
    "Kernel",
    "Messages",
    "Piece",
    "ReferenceKernel",
    "Ring",
    "RingFacts",
    "TorchFlash",
    "ring_attention",
]
