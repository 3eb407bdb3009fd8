"""How many loaders a job has: sizing them under a budget, adding and removing them during a run, and what actors may use."""

from overlord.fleet.autoscaler import Autoscale as Autoscale
from overlord.fleet.sizing import partition as partition
from overlord.loaders.autoscaling import ScalingPolicy as ScalingPolicy
from overlord.loaders.model import Budget as Budget
from overlord.loaders.model import Partition as Partition
from overlord.loaders.model import Share as Share
from overlord.loaders.partition import Partitioning as Partitioning
from overlord.runtime.ray import ActorOptions as ActorOptions
