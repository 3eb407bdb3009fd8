"""Pipeline parallelism: a simulator of 1F1B, and the order of microbatches."""

from overlord.arrange.pipelines.ordering import level, order, timing

__all__ = ["level", "order", "timing"]
