"""The house: every file is in DESIGN.md's tree and in a layer, none is a splinter, and a trainer's import is light."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent.parent
PACKAGE = HERE / "src" / "overlord"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}
MOST_MODULES = 40
SPLINTER_LINES = 40


def test_the_tree_in_design_names_every_file_and_no_other():
    tree = (HERE / "DESIGN.md").read_text().partition("src/overlord/\n")[2].partition("\ntests/ ")[0]
    named: list[str] = []
    rooms: list[str] = []
    for line in tree.splitlines():
        room = re.match(r"( +)(\w+)/ ", line)
        if room:
            rooms = [*rooms[: len(room.group(1)) // 2 - 1], room.group(2)]
        elif line.startswith(" " * 18):
            named += ["/".join([*rooms, file]) for file in line.split() if re.fullmatch(r"\w+\.(py|pyi|html)", file)]
    files = [path for kind in ("*.py", "*.pyi", "*.html") for path in PACKAGE.rglob(kind)]
    there = {str(path.relative_to(PACKAGE)) for path in files if path.name != "__init__.py"} | {"__init__.py"}
    assert [name for name, count in Counter(named).items() if count > 1] == []
    assert set(named) == there


def test_every_module_is_in_a_layer():
    config = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in config["contracts"] if each["name"] == "imports go one way")
    listed = [name.strip(" ()") for layer in layers for name in layer.split("|")]
    outside = [name for name in MODULES if not any(name == each or name.startswith(f"{each}.") for each in listed)]
    assert outside == []


def test_no_module_is_a_splinter_of_its_only_importer():
    importers: dict[str, set[str]] = {name: set() for name in MODULES}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.get(name, set()).add(str(path))
    short = {name for name, path in MODULES.items() if len(path.read_text().splitlines()) < SPLINTER_LINES}
    # Strategies are a file each, whatever their length; `python -m` looks for __main__; the demo copies its job file.
    kept = ("overlord.arrange.strategies.", "overlord.__main__", "overlord.demo.job")
    assert [name for name in sorted(short) if len(importers[name]) == 1 and not name.startswith(kept)] == []


def test_a_trainer_that_connects_loads_few_of_our_modules():
    code = "import sys, overlord; overlord.connect; print(sum(m.partition('.')[0] == 'overlord' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= MOST_MODULES


def test_no_two_classes_or_type_aliases_have_one_name():
    """Fingerprints of states name our classes without their modules."""
    names = Counter(name for path in MODULES.values() for name in _type_names(ast.parse(path.read_text())))
    assert [name for name, count in names.items() if count > 1] == []


def _type_names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                yield name
