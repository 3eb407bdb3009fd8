"""A model of the memory and the connections of each role, compared with loaders that open every source in every worker of
every rank. Its figures come from this project's own memory benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import SpecError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintModel:
    """The assumptions of the model. Sizes are in bytes."""

    process: int = 128 * MIB
    """A Python process with Arrow loaded and no data."""
    source: int = 2_400 * 1024
    """An open source: the row group being read (1.6 MiB decoded), its footer, and what the allocator keeps. Corpora with
    larger row groups take more, the baseline most of all."""
    place: int = 17
    """A token in a batch: token 4, label 8, position 4, loss mask 1."""
    fact: int = 80
    """A sample in a plan: its columns of facts, its order and row."""
    lane: int = 8192 * 24
    """The facts of one source that the Planner keeps ready."""
    workers_per_rank: int = 4
    """Worker processes per rank of the baseline."""
    sources_per_host: int = 64
    """The most sources in one loader host."""
    tokens_per_s_of_host: float = 16e6
    """Four threads that tokenize text at 4 million tokens per second each."""
    steps_ahead: int = 3
    """Steps that a Data Constructor holds: the one being fetched and two that are ready."""


@dataclass(frozen=True, slots=True)
class Role:
    """One role: the number of its processes, and the memory and connections of each."""

    name: str
    count: int
    bytes_each: float
    connections_each: float

    @property
    def total_bytes(self) -> float:
        return self.count * self.bytes_each

    @property
    def total_connections(self) -> float:
        return self.count * self.connections_each


@dataclass(frozen=True, slots=True)
class Footprint:
    """The footprint of all roles, and of the baseline's workers. Clients count too, though they run inside trainers."""

    roles: tuple[Role, ...]
    baseline: Role

    @property
    def total_bytes(self) -> float:
        return sum(role.total_bytes for role in self.roles)

    @property
    def most_connections(self) -> float:
        """The most connections of any process."""
        return max(role.connections_each for role in self.roles)

    @property
    def saved(self) -> float:
        """The memory of the baseline over that of all roles."""
        return self.baseline.total_bytes / self.total_bytes


def footprint(
    *,
    num_sources: int,
    num_ranks: int,
    num_constructors: int,
    step_tokens: float,
    step_samples: float,
    step_s: float,
    image_bytes: float = 0.0,
    model: FootprintModel | None = None,
) -> Footprint:
    """Estimate the memory and connections of a job. Steps have `step_tokens` tokens in `step_samples` samples, decoded
    images of `image_bytes`, and take `step_s` seconds each."""
    if num_sources < 1 or num_ranks < 1 or not 1 <= num_constructors <= num_ranks:
        raise SpecError(
            f"a footprint needs sources, ranks and one to ranks constructors, got {num_sources} sources, {num_ranks} ranks "
            f"and {num_constructors} constructors"
        )
    b = FootprintModel() if model is None else model
    hosts = max(-(-num_sources // b.sources_per_host), round(step_tokens / max(step_s, 1e-9) / b.tokens_per_s_of_host + 0.5))
    step_bytes = step_tokens * b.place + image_bytes
    planner = b.process + num_sources * b.lane + (b.steps_ahead + 2) * step_samples * b.fact
    loader = b.process + num_sources * b.source / hosts
    constructor = b.process + b.steps_ahead * step_bytes / num_constructors
    if num_sources < hosts:  # several loaders share a source, and each has it open
        loader = b.process + b.source
    roles = (
        Role("planner", 1, planner, hosts + num_constructors),
        Role("loader hosts", hosts, loader, num_constructors + 1),
        Role("constructors", num_constructors, constructor, hosts + 1 + num_ranks / num_constructors),
        Role("clients", num_ranks, 2 * step_bytes / num_ranks, 1),
    )
    workers = num_ranks * b.workers_per_rank
    worker = b.process + num_sources * b.source + 2 * step_bytes / num_ranks / b.workers_per_rank
    return Footprint(roles, Role("baseline workers", workers, worker, num_sources))
