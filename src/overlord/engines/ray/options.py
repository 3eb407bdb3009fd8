"""What the actors of a role ask of the cluster, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """Resources and placement of each actor of a role.

    `placement`: "spread" over the nodes; "here" on the node of the process that calls `overlord.start`, if it has room;
    "any" where Ray likes. `labels` are node labels that the node must have.
    """

    num_cpus: float = 0
    memory_bytes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    placement: Literal["spread", "here", "any"] = "any"
    max_concurrency: int = 64
    """Asks that the actor answers side by side; more wait their turn."""

    def __post_init__(self) -> None:
        if self.num_cpus < 0:
            raise SpecError(f"num_cpus cannot be negative, got {self.num_cpus}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise SpecError(f"memory_bytes must be positive, got {self.memory_bytes}")
        if self.placement not in ("spread", "here", "any"):
            raise SpecError(f"placement is spread, here or any, not {self.placement!r}")
        if self.max_concurrency < 2:
            raise SpecError(f"max_concurrency must be at least 2: a role answers while it waits, got {self.max_concurrency}")

    def for_ray(self) -> dict[str, Any]:
        """As options of a Ray actor, placement left out."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "max_concurrency": self.max_concurrency}
        # At least a byte: an actor that asks for nothing at all is put on any node, whatever its placement says.
        options["memory"] = self.memory_bytes or 1
        if self.resources:
            options["resources"] = dict(self.resources)
        if self.labels:
            options["label_selector"] = dict(self.labels)
        return options

    def __str__(self) -> str:
        asked = [f"num_cpus={self.num_cpus:g}"]
        if self.memory_bytes is not None:
            asked.append(f"memory={self.memory_bytes:,} bytes")
        asked += [f"{name}={amount:g}" for name, amount in self.resources.items()]
        asked += [f"node label {name}={value}" for name, value in self.labels.items()]
        return ", ".join(asked)
