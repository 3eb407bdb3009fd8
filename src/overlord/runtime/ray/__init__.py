"""The Ray engine, which runs every role in its own actor: on several processes and machines."""

from overlord.runtime.ray.engine import ActorOptions, Ray

__all__ = ["ActorOptions", "Ray"]
