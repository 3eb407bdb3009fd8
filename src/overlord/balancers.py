"""Methods for `DGraph.balance` and `strategies.long_short(method=...)`: share items of known cost over equal bins."""

from overlord.arrange.balancing import Balancer as Balancer
from overlord.arrange.balancing import greedy as greedy
from overlord.arrange.balancing import karmarkar_karp as karmarkar_karp
