"""Every role an actor on Ray: more than one process, and more than one machine."""

from overlord.engines.ray.engine import Ray
from overlord.engines.ray.options import ActorOptions

__all__ = ["ActorOptions", "Ray"]
