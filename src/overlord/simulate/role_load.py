"""A model of what planner and constructors do for a step: CPU time, messages and bytes. The planner's figures come from
`python -m bench planner`, those of constructors from `python -m bench trainers`, on machines that bench/README.md names."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """The assumptions of the model."""

    groups_per_host: int = 8
    """Data-parallel groups whose constructors share a process: those of a node."""
    sample_s: float = 0.9e-6
    """To draw a sample, to sort it into its group, and to send it."""
    host_s: float = 150e-6
    """To take and send the messages of a host for one step."""
    sample_bytes: int = 72
    """A sample in a message to another machine: eight columns, and its share of the rest."""
    steps_together: int = 4
    """Steps in one message with plans."""
    token_s: float = 14e-9
    """To build a token into a batch and deliver it."""
    image_byte_s: float = 7e-9
    """For a byte of an image as the batch holds it: to decode, resize and place it."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What each process of a role does for one step."""

    name: str
    count: int
    cpu_ms: float
    messages: float
    """Sent and received between planner and hosts of constructors."""
    num_bytes: float
    """Of plans, in these messages, where hosts are on other machines."""


def role_loads(
    *,
    num_groups: int,
    step_samples: float,
    step_tokens: float,
    plan_s: float,
    image_bytes: float = 0.0,
    model: LoadModel | None = None,
) -> tuple[RoleLoad, RoleLoad]:
    """Predict the load of the planner and of each host of constructors. Steps have `step_samples` samples with
    decoded images of `image_bytes` in all, and the strategy takes `plan_s` for each step."""
    if num_groups < 1:
        raise SpecError(f"a load needs at least one data-parallel group, got {num_groups}")
    m = LoadModel() if model is None else model
    hosts = -(-num_groups // m.groups_per_host)
    per_host = 1 + 1 / m.steps_together  # a note of the step, and its share of a message with plans
    plan_bytes = step_samples * m.sample_bytes
    host_s = (step_tokens * m.token_s + image_bytes * m.image_byte_s) / hosts
    planner_s = plan_s + step_samples * m.sample_s + hosts * m.host_s
    return (
        RoleLoad("planner", 1, planner_s * 1e3, hosts * per_host, plan_bytes),
        RoleLoad("hosts of constructors", hosts, host_s * 1e3, per_host, plan_bytes / hosts),
    )
