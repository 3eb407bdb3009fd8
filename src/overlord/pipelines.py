"""Pipeline parallelism: the fields of each stage; and for strategies of your own, the order and cost of microbatches."""

from overlord.arrange.pipelines.ordering import level as level
from overlord.arrange.pipelines.ordering import order as order
from overlord.arrange.pipelines.ordering import timing as timing
from overlord.arrange.pipelines.simulator import Pipeline as Pipeline
from overlord.declare.mesh import StageFields as StageFields
