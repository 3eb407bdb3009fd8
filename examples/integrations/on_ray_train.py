"""Ray Train on Overlord: python examples/integrations/on_ray_train.py --workers 2 --until 10

`--serve` keeps the job in this process, where it outlives worker groups: it trains up to step 10 with two workers, and from
there with one.
"""

import json
import os
import tempfile
from itertools import islice
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_TRAIN_V2_ENABLED="1")

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer, get_device, prepare_model
from tiny import LEARNING_RATE, Journal, TinyModel, declare, options, parser

import overlord as ol
from overlord.integrations import ray_train


def train(config: dict) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    os.environ.update(RANK=str(context.get_world_rank()), WORLD_SIZE=str(context.get_world_size()))
    model = prepare_model(TinyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/model.pt", map_location=get_device())
        model.load_state_dict(_renamed(saved["model"], model))
        optimizer.load_state_dict(saved["optimizer"])
    journal, losses = Journal(Path(config["folder"]), config["until"]), []
    with ray_train.client(config["job"], address=config["address"]) as client:
        for step in islice(client, config["until"] - client.step):
            total = 0.0
            for micro in step:
                journal.note(micro["tokens"], micro["position_ids"])
                summed = model(micro["tokens"], micro["position_ids"], micro["labels"])
                (summed * context.get_world_size() / step.loss_tokens).backward()  # DDP averages over the workers
                total += summed.item() / step.loss_tokens
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        with tempfile.TemporaryDirectory() as folder:
            if context.get_world_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/model.pt")
                ray_train.save_state(client, folder)
            found = ray.train.Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
            ray.train.report({"step": client.step}, checkpoint=found)
    if dist.is_initialized():
        dist.barrier()
    journal.write(losses, model, is_partial=True)


def _renamed(weights: dict, model: torch.nn.Module) -> dict:
    """The weights with the prefix that DDP gives them, which a single worker does not have."""
    prefix = "module." if next(iter(model.state_dict())).startswith("module.") else ""
    return {prefix + name.removeprefix("module."): value for name, value in weights.items()}


def fit(given, workers: int, until: int, *, job: ol.Job | None, address: str | None = None) -> None:
    config = {"until": until, "folder": str(given.folder.absolute()), "job": job, "address": address}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(storage_path=str(given.folder.absolute()), name="run"),
    )
    trainer.fit()
    print(json.dumps({"workers": workers, "until": until}))


def main() -> None:
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--serve", action="store_true")
    given = options()
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    job = declare(given.data.absolute())
    if not given.serve:
        fit(given, given.workers, given.until, job=job)
        return
    with ol.start(job) as loader:
        address = loader.serve()
        fit(given, 2, 10, job=None, address=address)
        fit(given, 1, given.until, job=None, address=address)


if __name__ == "__main__":
    main()
