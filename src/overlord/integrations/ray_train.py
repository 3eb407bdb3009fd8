"""Ray Train on Overlord's steps.

`client(job)` is called in the training function of each worker. It continues from the checkpoint that Ray Train restores, on
however many workers there are. With `address=`, the run is in a service that outlives worker groups: when Ray Train starts
another number of workers, the service is told to go on for that many.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.declare.mesh import Mesh
from overlord.errors import OverlordError, SpecError, StateError
from overlord.integrations.frameworks import require

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from overlord.declare.job import Job
    from overlord.service.client import Client

FILE = "overlord.json"
"""The file of the loader's state in a checkpoint's folder."""


def client(
    job: Job | None = None, *, address: str | None = None, token: str | None = None, mesh: Mesh | None = None, **options: Any
) -> Client:
    """Return the client of this worker, from the state in `ray.train.get_checkpoint()` if there is one.

    Every worker calls it, with the same arguments. With a `job`, the first worker starts it and serves it to the others.
    With the `address` of a service, the run there goes on for this worker group: for `mesh`, whose dp is what the number of
    workers leaves. Without a checkpoint it begins at the first step that not all ranks of the group before have taken.
    `options` are those of `overlord.trainer.attach`.
    """
    from overlord.trainer.launch import attach

    train = require("ray", "ray.train")
    checkpoint = train.get_checkpoint()
    saved = None if checkpoint is None else saved_state(checkpoint)
    if address is None:
        if job is None:
            raise SpecError("ray_train.client needs a job to start, or the address=... of a service that runs one")
        return attach(job, resume=saved, **options)
    if job is not None:
        raise SpecError("the service at `address` has a job already: give ray_train.client a job or an address, not both")
    _resize(address, token, (mesh or Mesh()).for_world(train.get_context().get_world_size()))
    found = attach(address=address, token=token, **options)
    if saved is not None:
        found.load_state_dict(saved)
    return found


def save_state(client: Client, folder: str | PathLike[str]) -> None:
    """Write the client's state into the folder of a checkpoint, before `ray.train.report`. It is the same on all workers,
    and one of them has to write it."""
    Path(folder, FILE).write_text(json.dumps(client.state_dict()), "utf-8")


def saved_state(checkpoint: Any) -> Mapping[str, Any]:
    """The loader's state in a checkpoint of Ray Train."""
    with checkpoint.as_directory() as folder:
        try:
            return json.loads(Path(folder, FILE).read_text("utf-8"))
        except FileNotFoundError:
            raise StateError(
                f"the checkpoint {checkpoint.path} has no {FILE}: call overlord.integrations.ray_train.save_state(client, "
                "folder) before ray.train.report"
            ) from None


def _resize(address: str, token: str | None, mesh: Mesh) -> None:
    """Let the run of a service go on for a mesh. The first worker asks for it, while the others wait for the outcome."""
    import torch.distributed as dist

    from overlord.service.admin import Control

    error: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            with Control(address, token=token) as control:
                control.resize(mesh, at=control.status().taken_to)
        except OverlordError as failed:
            error = [f"{type(failed).__name__}: {failed}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise SpecError(f"the run at {address} cannot go on for {mesh}: {error[0]}")
