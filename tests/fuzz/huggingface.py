"""What `save_to_disk` writes beside the Arrow files of a dataset: the lists of its splits and of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from overlord.formats import HuggingFaceFiles
from tests.fuzz.folders import change_json, folder_seed
from tests.fuzz.lake import TableTarget
from tests.fuzz.mutations import edited
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import RECORDED

_FILES = {"one": ("one%state.json",), "splits": ("splits%dataset_dict.json", "splits%train%state.json")}
"""A file lies in the folders that its name has."""


def make_seeds() -> Sequence[Seed]:
    recorded = RECORDED / "huggingface"
    return [
        folder_seed(name, {file: (recorded / place(file)).read_bytes() for file in files}) for name, files in _FILES.items()
    ]


def place(name: str) -> str:
    return name.replace("%", "/")


def source(folder: Path, files: Mapping[str, bytes]) -> HuggingFaceFiles:
    if _is_split(files):
        return HuggingFaceFiles(folder / "splits", split="train")
    return HuggingFaceFiles(folder / "one")


def _is_split(files: Mapping[str, bytes]) -> bool:
    return any(name.startswith("splits") for name in files)


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    folder = RECORDED / "huggingface" / ("splits/train" if _is_split(files) else "one")
    try:
        if _is_split(files) and "train" not in _listed(json.loads(files["splits%dataset_dict.json"])["splits"]):
            raise OracleFailed("no such split")
        state = json.loads(files["splits%train%state.json" if _is_split(files) else "one%state.json"])
        if state.get("_indices_data_files"):
            raise OracleFailed("rows in another order")
        names = [each["filename"] for each in _listed(state["_data_files"])]
        tables = [pa.ipc.open_stream(pa.OSFile(f"{folder}/{name}", "rb")).read_all() for name in names]
        return [answer_of(pa.concat_tables(tables).replace_schema_metadata(None))]
    except Exception as error:  # whatever damaged files make of plain Python
        raise OracleFailed(str(error)) from error


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise OracleFailed("no list")
    return value


TARGET = TableTarget(
    "huggingface",
    make_seeds,
    source,
    oracle,
    tuple(change_json(name, edited) for files in _FILES.values() for name in files),
    place=place,
)
