"""The files in deploy/ are valid by the schemas of what reads them and in step with the command line, and run as far as one
machine can run them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from overlord.cli import build_parser
from tests.commands import ROOT, environment
from tests.faults.trainers import wait_until
from tests.service.test_reconnect import free_port

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kube*/*.yaml"))
KUBERNETES = "1.33"
"""Sidecars are on by default since 1.29."""
SCRIPT = DEPLOY / "slurm" / "train.sbatch"


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in a document."""
    if isinstance(value, dict):
        if "template" in value and "spec" in value["template"]:
            yield value["template"]
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of Overlord in deploy/, with the file that has it."""
    for file in MANIFESTS:
        for document in documents(file):
            if "entrypoint" in document["spec"]:
                yield file.name, shlex.split(document["spec"]["entrypoint"])
            for template in templates(document):
                yield from ((file.name, each["command"]) for each in containers(template["spec"]) if "command" in each)
    unit = (DEPLOY / "systemd" / "overlord.service").read_text()
    yield "overlord.service", shlex.split(re.findall("^ExecStart=(.*)$", unit, re.M)[0])
    joined = SCRIPT.read_text().replace("\\\n", " ")
    yield from (("train.sbatch", shlex.split(found)[:-1]) for found in re.findall(r"overlord serve .*&$", joined, re.M))


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(file: Path):
    kinds = [document["kind"] for document in documents(file)]
    for document in documents(file):
        if document["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        for template in templates(document):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert kinds


def test_the_cluster_of_ray_has_what_its_operator_requires():
    (job,) = [document for document in documents(DEPLOY / "kuberay" / "rayjob.yaml") if document["kind"] == "RayJob"]
    assert job["spec"].keys() <= {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_what_manifests_refer_to_is_there(file: Path):
    found = documents(file)
    services = {each["metadata"]["name"]: each for each in found if each["kind"] == "Service"}
    claims = {each["metadata"]["name"] for each in found if each["kind"] == "PersistentVolumeClaim"}
    pods = [template for document in found for template in templates(document)]
    for document in found:
        made = [each["metadata"]["name"] for each in document["spec"].get("volumeClaimTemplates", [])]
        for pod in (template["spec"] for template in templates(document)):
            volumes = {*made, *(each["name"] for each in pod["volumes"])}
            for container in containers(pod):
                assert {each["name"] for each in container["volumeMounts"]} <= volumes
                ports = {each["name"] for each in container.get("ports", [])}
                for probe in ("startupProbe", "livenessProbe"):
                    assert container.get(probe, {}).get("tcpSocket", {}).get("port", "steps") in {*ports, "steps"}
                address = [each["value"] for each in container.get("env", []) if each["name"] == "OVERLORD_ADDRESS"]
                for host, port in (each.removeprefix("grpc://").split(":") for each in address):
                    assert host == "127.0.0.1" or int(port) in [each["port"] for each in services[host]["spec"]["ports"]]
            assert {
                v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
            } <= claims
    for service in services.values():
        selected = [pod for pod in pods if pod.get("metadata", {}).get("labels") == service["spec"]["selector"]]
        open_ports = {
            port["containerPort"] for pod in selected for each in pod["spec"]["containers"] for port in each["ports"]
        }
        assert {each["port"] for each in service["spec"]["ports"]} <= open_ports


def test_every_command_is_one_of_this_release_and_survives_a_restart():
    served = [(file, words) for file, words in commands() if Path(words[0]).name == "overlord"]
    assert len(served) == 5
    for _, words in served:
        options = build_parser().parse_args(words[1:])
        assert options.log is not None
        assert str(options.resume) == "log", "the same command starts the run and continues it"
        host = options.address.rpartition(":")[0]
        assert host == "127.0.0.1" or options.token_file is not None, "off loopback the service requires a token"
        assert options.metrics is None or options.metrics.rpartition(":")[0] == host


def test_the_image_installs_extras_that_exist_and_copies_files_that_do():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=([\w,-]+)", "\n".join(lines))
    assert len(named) == 2
    assert {extra for each in named for extra in each.split(",")} <= project["optional-dependencies"].keys()
    copied = [word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    (entry,) = [line for line in lines if line.startswith("ENTRYPOINT")]
    assert yaml.safe_load(entry.removeprefix("ENTRYPOINT ")) == [*project["scripts"]]


SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = [word for word in words if word.startswith("--")][: next(i for i, word in enumerate(words) if word[:2] != "--")]
command = words[len(options):]
ranks = range(1 if "--ntasks=1" in options else {trainers})
running = [subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(rank)}}) for rank in ranks]
signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in running])
status = [each.wait() for each in running]
sys.exit(next((1 for each in status if each), 0))
"""
JOB = """
import overlord as ol
from tests.small_sources import Numbered, job_of

job = job_of({"a": Numbered(4000)}, batch=ol.Batch(samples=8, sequence_length=16), mesh=ol.Mesh(dp=2))
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, with stand-ins for `srun` and `scontrol`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": SRUN.format(python=sys.executable, trainers=2),
        "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
        "overlord": f'#!/bin/sh\nexec {sys.executable} -m overlord "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "OVERLORD_WORK": str(tmp_path / "work")}
    found = environment(**given, PATH=f"{programs}:{os.environ['PATH']}", OVERLORD_PORT=str(free_port()))
    found.pop("PYTHONUNBUFFERED", None)  # it would write a line in two pieces, between which others write
    return found


def test_the_script_for_slurm_gives_up_a_job_that_cannot_start(tmp_path: Path, slurm: dict[str, str]):
    (tmp_path / "job.py").write_text("job = 1 / 0")
    command = ["bash", SCRIPT, tmp_path / "job.py", DEPLOY / "train.py"]
    run = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=100)
    assert run.returncode != 0
    assert "ZeroDivisionError" in run.stderr
    assert "the service does not start" in run.stderr


@pytest.mark.second_try(reason="a killed service must be back, and 4,000 steps end, within 100 s")
def test_the_script_for_slurm_trains_and_starts_a_killed_service_again(tmp_path: Path, slurm: dict[str, str]):
    (tmp_path / "job.py").write_text(JOB)
    num_steps = 4000  # a few seconds, so that there is time to kill the service
    words = (tmp_path / "words").open("w+")
    script = subprocess.Popen(
        ["bash", SCRIPT, tmp_path / "job.py", DEPLOY / "train.py", str(num_steps)],
        stdout=words,
        stderr=subprocess.STDOUT,
        env=slurm,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: " step 20:" in (tmp_path / "words").read_text(), 60), (tmp_path / "words").read_text()
        family = psutil.Process(script.pid).children(recursive=True)
        (service,) = [each for each in family if each.cmdline()[1:4] == ["-m", "overlord", "serve"]]
        service.send_signal(signal.SIGKILL)
        assert script.wait(100) == 0, (tmp_path / "words").read_text()
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()
        words.close()
    said = (tmp_path / "words").read_text()
    assert "the service ended with status" in said
    for rank in range(2):
        steps = [int(step) for step in re.findall(rf"^rank {rank} step (\d+):", said, re.M)]
        assert steps == list(range(num_steps)), f"rank {rank} got every step once, in order"
    assert (tmp_path / "work" / "state.json").exists(), "the service was stopped, not killed, at the end"
    assert (tmp_path / "work" / "token").stat().st_mode & 0o77 == 0
