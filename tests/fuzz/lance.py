"""The data files of a Lance dataset. Its manifests and lists of deletions are left whole: the library ends the process for
some damage to them, before it returns anything that could be checked (docs/formats.md).

The oracle is the library's own scan: its files have no checksums, so that damage to values cannot be seen, and both must
return the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from overlord.formats import Lance
from tests.fuzz.folders import change_number, folder_seed
from tests.fuzz.lake import TableTarget
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import RECORDED


def make_seeds() -> Sequence[Seed]:
    recorded = RECORDED / "lance"
    files = {str(path.relative_to(recorded)): path.read_bytes() for path in sorted(recorded.rglob("*")) if path.is_file()}
    damaged = {name.replace("/", "%"): data for name, data in files.items() if name.startswith("data")}
    return [folder_seed("table", damaged)]


def place(name: str) -> str:
    return name.replace("%", "/")


def source(folder: Path, files: Mapping[str, bytes]) -> Lance:
    del files
    return Lance(folder, unit_rows=16, version=3)


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    library = import_module("lance")  # by name: a checker would take this file for it
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RECORDED / "lance", folder, dirs_exist_ok=True)
        shutil.rmtree(Path(folder) / "data")
        (Path(folder) / "data").mkdir()
        for name, data in files.items():
            (Path(folder) / place(name)).write_bytes(data)
        try:
            return [answer_of(library.dataset(folder, version=3).to_table().replace_schema_metadata(None))]
        except BaseException as error:  # panics are no Exceptions
            raise OracleFailed(str(error)) from error


TARGET = TableTarget("lance", make_seeds, source, oracle, (change_number,), place=place)
