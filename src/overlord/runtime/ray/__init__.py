"""Every role an actor on Ray: more than one process, and more than one machine."""

from overlord.runtime.ray.engine import ActorOptions, Ray

__all__ = ["ActorOptions", "Ray"]
