"""Strategies: plain functions from a DGraph to a Plan. Write your own the same way, and pass it as
Job(strategy=...)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from overlord.arrange.strategies.hdp import hdp
from overlord.arrange.strategies.long_short import long_short
from overlord.arrange.strategies.multimodal import multimodal
from overlord.arrange.strategies.plain import plain

if TYPE_CHECKING:
    from overlord.arrange.graph import DGraph
    from overlord.arrange.plan import Plan


class Strategy(Protocol):
    """A function that arranges the samples of a step: from the step's DGraph to a Plan.

    It must be a pure function of the graph. It may not add, drop or change samples: which samples make a step is
    decided before, so that the stream does not depend on the strategy.
    """

    def __call__(self, graph: DGraph, /) -> Plan: ...


__all__ = ["Strategy", "hdp", "long_short", "multimodal", "plain"]
