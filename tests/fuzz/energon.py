"""Energon's YAML: a metadataset that holds another one, and the splits of their datasets. The shards are whole."""

from __future__ import annotations

import io
import math
import posixpath
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from overlord.formats import energon
from tests.fuzz.folders import FolderTarget, folder_seed, pack, read_source, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.targets import Answer, Case, OracleFailed, Seed

_SHARDS = {"coco": 3, "laion": 2}
_SPLIT = "exclude: []\nsplit_parts:\n  train:\n  - shard_{0..1}.tar\n  - 'shard_2.tar'\n  val:\n  - shard_1.tar\n"
_FILES = {
    "outer.yaml": "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    "    - weight: 6\n      path: coco\n    - weight: 4\n      path: ./inner.yaml\n  val:\n    path: coco\n",
    "inner.yaml": "__module__: megatron.energon\n__class__: Metadataset\nsplits:\n  train:\n    datasets:\n"
    "    - weight: 0.5\n      path: laion\n      split: val\n    - {path: coco, weight: 1}\n",
    "coco%.nv-meta%split.yaml": _SPLIT,
    "laion%.nv-meta%split.yaml": "exclude:\n- shard_0.tar\nsplit_parts:\n"
    "  train: [shard_0.tar]\n  val: ['shard_{0..1}.tar']\n",
}
"""A file lies in the folders that its name has."""


def make_seeds() -> Sequence[Seed]:
    return [folder_seed("blend", {name: text.encode() for name, text in _FILES.items()})]


def shard(dataset: str, number: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for text in texts(dataset, number):
            info = tarfile.TarInfo(f"{text}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def texts(dataset: str, number: int) -> list[str]:
    return [f"{dataset}-{number}-{row}" for row in range(2)]


def change_yaml(rng: random.Random, seed: Seed) -> bytes:
    """Leaves a file YAML."""
    files = unpack(seed.data)
    name = rng.choice(list(files))
    files[name] = yaml.safe_dump(edited(rng, yaml.safe_load(files[name])), sort_keys=False).encode()
    return pack(files)


@dataclass
class BlendTarget(FolderTarget):
    def read(self, case: Case, folder: Path) -> Answer:
        for dataset, num_shards in _SHARDS.items():
            (folder / dataset / ".nv-meta").mkdir(parents=True)
            for number in range(num_shards):
                (folder / dataset / f"shard_{number}.tar").write_bytes(shard(dataset, number))
        for name, data in unpack(case.data).items():
            path = folder / name.replace("%", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        blend = energon(folder / "outer.yaml", tokens=None)
        rows = [row for source in blend.sources.values() for row in read_source(source).rows]
        return Answer(rows, about=_rounded(blend.weights))


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        parts = _parts(files, "outer.yaml", "train", 1.0, 0)
        names: list[str] = []
        for name, _, _ in parts:
            number = 1 + sum(each == name or each.startswith(f"{name}-") for each in names)
            names.append(name if number == 1 else f"{name}-{number}")
        weights = dict(zip(names, [weight for _, weight, _ in parts], strict=True))
        rows = [repr((text.encode(), text.encode())) for _, _, rows in parts for text in rows]
        return [Answer(rows, about=_rounded(weights))]
    except Exception as error:  # whatever damaged files make of plain Python
        raise OracleFailed(str(error)) from error


def _rounded(weights: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{weight:.9g}" for name, weight in weights.items()}


def _parts(files: Mapping[str, bytes], path: str, split: str, weight: float, depth: int) -> list[Any]:
    """(dataset, weight, texts) of all that a path holds."""
    if depth > 20:
        raise OracleFailed("no end")
    if not path.endswith((".yaml", ".yml")):
        return [(path.rpartition("/")[2], weight, _texts(files, path, split))]
    part = yaml.safe_load(files[path.replace("/", "%")])["splits"][split]
    entries = part.get("blend") or part.get("datasets") or [part]
    shares = [entry.get("weight", 1.0) for entry in entries]
    total = sum(map(float, shares))
    if any(isinstance(share, (bool, str)) or share <= 0 or not math.isfinite(share / total) for share in shares):
        raise OracleFailed("no weight")
    found: list[Any] = []
    for entry, share in zip(entries, shares, strict=True):
        if "subset" in entry:
            raise OracleFailed("a subset")
        inner = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry["path"]))
        name = entry.get("split_part") or entry.get("split") or split
        found += _parts(files, inner, name, weight * share / total, depth + 1)
    return found


def _texts(files: Mapping[str, bytes], dataset: str, split: str) -> list[str]:
    content = yaml.safe_load(files[f"{dataset}%.nv-meta%split.yaml"])
    excluded = content.get("exclude") or []
    shards = content["split_parts"][split]
    if not isinstance(excluded, list) or not isinstance(shards, list):
        raise OracleFailed("no list")
    names: list[str] = []
    for pattern in shards:
        first = {"shard_{0..1}.tar": ["shard_0.tar", "shard_1.tar"]}.get(pattern, [pattern])
        names += [name for name in first if name not in excluded]
    known = {f"shard_{number}.tar": texts(dataset, number) for number in range(_SHARDS[dataset])}
    return [text for name in names for text in known[name]]


TARGET = BlendTarget("energon", make_seeds, lambda folder, files: None, oracle, (change_yaml,) * 3)  # pyright: ignore
