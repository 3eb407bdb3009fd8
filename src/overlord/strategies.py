"""The strategies that come with Overlord, for `Job(strategy=...)`. Each call returns a function from a DGraph to a Plan."""

from overlord.arrange.strategies import hdp as hdp
from overlord.arrange.strategies import long_short as long_short
from overlord.arrange.strategies import multimodal as multimodal
from overlord.arrange.strategies import plain as plain
