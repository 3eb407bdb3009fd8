"""Pipeline parallelism, for strategies of your own: the cost levels and the order of microbatches."""

from overlord.arrange.pipelines.ordering import level as level
from overlord.arrange.pipelines.ordering import order as order
from overlord.arrange.pipelines.ordering import timing as timing
from overlord.arrange.pipelines.simulator import Pipeline as Pipeline
