"""Hybrid data parallelism: documents over as many ranks as they need."""

from overlord.arrange.hdp.splitting import split

__all__ = ["split"]
