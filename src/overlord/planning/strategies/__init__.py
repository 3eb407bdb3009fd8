"""Strategies: plain functions from a DGraph to a Plan. Write your own the same way, and pass it as
Job(strategy=...)."""

from __future__ import annotations

from collections.abc import Callable

from overlord.planning.dgraph import DGraph
from overlord.planning.plan import Plan
from overlord.planning.strategies.hdp import hdp
from overlord.planning.strategies.long_short import long_short
from overlord.planning.strategies.multimodal import multimodal
from overlord.planning.strategies.plain import plain

Strategy = Callable[[DGraph], Plan]

__all__ = ["Strategy", "hdp", "long_short", "multimodal", "plain"]
