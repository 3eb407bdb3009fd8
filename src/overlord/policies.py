"""Settings of a job that most jobs leave alone: bad rows, retries, very long documents, sizes that grow, and weights that
follow losses."""

from overlord.declare.mixture import Epochs as Epochs
from overlord.declare.mixture import Feedback as Feedback
from overlord.declare.mixture import MixtureProgress as MixtureProgress
from overlord.declare.mixture import MultiplicativeWeights as MultiplicativeWeights
from overlord.declare.policies import OutlierDelay as OutlierDelay
from overlord.declare.policies import WarmUp as WarmUp
from overlord.declare.source import BadRows as BadRows
from overlord.sources.object_store import Retry as Retry
