"""Hybrid data parallelism, for strategies of your own: documents over as many ranks as they need."""

from overlord.arrange.hdp.offload import Offload as Offload
from overlord.arrange.hdp.splitting import split as split
