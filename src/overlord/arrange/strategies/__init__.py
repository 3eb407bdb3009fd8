"""Strategies: plain functions from a DGraph to a Plan. Write your own the same way, and pass it as
Job(strategy=...)."""

from __future__ import annotations

from collections.abc import Callable

from overlord.arrange.graph import DGraph
from overlord.arrange.plan import Plan
from overlord.arrange.strategies.hdp import hdp
from overlord.arrange.strategies.long_short import long_short
from overlord.arrange.strategies.multimodal import multimodal
from overlord.arrange.strategies.plain import plain

Strategy = Callable[[DGraph], Plan]

__all__ = ["Strategy", "hdp", "long_short", "multimodal", "plain"]
