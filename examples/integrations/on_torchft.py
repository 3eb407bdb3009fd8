"""torchft on Overlord: python examples/integrations/on_torchft.py --until 15

Two replicas train. One of them dies in the middle of step 5; the other goes on alone, and from step 8 on with it again.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import LEARNING_RATE, TinyModel, declare, options, parser

import overlord as ol

DIES_AT, BACK_AT = 5, 8


def wait_for(folder: Path, mark: str) -> None:
    """Until another process has come so far. Replicas of a real run wait for nobody: here each step has a known number."""
    until = time.monotonic() + 240
    while not (folder / mark).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{mark} did not come within 240 s")
        time.sleep(0.1)


def train_replica(given) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from overlord.integrations.torchft import ReplicaSteps

    if given.is_back:
        wait_for(given.folder, "alone")
    model = TinyModel()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica_{given.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=given.lighthouse,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    # Both managers send heartbeats: the first one would train alone as long as the lighthouse knows no other.
    (given.folder / f"ready-{given.replica}{'-again' * given.is_back}").touch()
    wait_for(given.folder, f"ready-{1 - given.replica}")
    optimizer = Optimizer(manager, inner)
    steps = ReplicaSteps(manager, given.address, timeout_s=60)
    record = (given.folder / f"replica-{given.replica}-{os.getpid()}.jsonl").open("a")
    while manager.current_step() < given.until:
        if given.replica == 0 and manager.current_step() == BACK_AT:
            (given.folder / "alone").touch()
            wait_for(given.folder, "ready-1-again")
        optimizer.zero_grad()  # forms the quorum
        step = next(steps)
        if given.replica == 1 and step.number == DIES_AT:
            os._exit(1)
        total = 0.0
        for micro in step:
            summed = model(micro["tokens"], micro["position_ids"], micro["labels"])
            steps.scaled_loss(summed, step).backward()
            total += summed.item() / step.loss_tokens
        for parameter in model.parameters():  # once a step, not for every microbatch
            manager.allreduce(parameter.grad).wait()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:  # committed
            rows = [int(token) for micro in step for token in micro["tokens"]]
            entry = {"step": step.number, "loss": total, "tokens": rows, "replicas": manager.num_participants()}
            print(json.dumps(entry), file=record, flush=True)
    steps.close()
    manager.shutdown(wait=False)


def main() -> None:
    parser.add_argument("--replica", type=int)
    parser.add_argument("--address")
    parser.add_argument("--lighthouse")
    parser.add_argument("--is-back", action="store_true")
    given = options()
    if given.replica is not None:
        train_replica(given)
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=10_000)
    port = lighthouse.address().rpartition(":")[2]
    with ol.start(declare(given.data)) as loader:
        address = loader.serve()
        command = [sys.executable, __file__, "--data", given.data, "--folder", given.folder, "--until", given.until]
        command += ["--address", address, "--lighthouse", f"http://127.0.0.1:{port}"]

        def start(replica: int, *more: object) -> subprocess.Popen:
            return subprocess.Popen([*map(str, command), "--replica", str(replica), *map(str, more)])

        first, second = start(0), start(1)
        assert second.wait(300) == 1
        again = start(1, "--is-back")
        assert first.wait(300) == again.wait(300) == 0
    lighthouse.shutdown()
    found = [json.loads(line) for path in Path(given.folder).glob("replica-*.jsonl") for line in path.open()]
    replicas = {entry["step"]: entry["replicas"] for entry in found}
    print("replicas of each step", *(replicas[step] for step in sorted(replicas)))


if __name__ == "__main__":
    main()
