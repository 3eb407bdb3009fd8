"""TempBalance: layer-wise learning rates from the heavy tails of weight spectra (arXiv 2312.00359, 2410.12178).

`TempBalance(optimizer, model)` is all that most runs need. `mapping` (`Linear`, `Sigmoid`, ...), `unit` (`PerBlock`,
`PerLayer`) and `spectrum` (`WholeMatrix`, `FixedAspectRatio`) are its options.
"""

from overlord.trainer.tempbalance.balancer import TempBalance, usual_interval
from overlord.trainer.tempbalance.groups import PerBlock, PerLayer
from overlord.trainer.tempbalance.mappings import Linear, Log2, Mapping, Normalised, Rank, Sigmoid, Sqrt
from overlord.trainer.tempbalance.spectra import FixedAspectRatio, WholeMatrix

__all__ = [
    "FixedAspectRatio",
    "Linear",
    "Log2",
    "Mapping",
    "Normalised",
    "PerBlock",
    "PerLayer",
    "Rank",
    "Sigmoid",
    "Sqrt",
    "TempBalance",
    "WholeMatrix",
    "usual_interval",
]
