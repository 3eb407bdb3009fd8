"""What users may import, what help() and type checkers say of it, and that no heavy library comes along."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol

HEAVY = ("torch", "ray", "PIL", "simplejpeg", "obstore", "tiktoken", "tokenizers", "rich", "pandas", "pyarrow.flight")
FLAT = {
    *("Job", "Batch", "Mixture", "Mesh", "Log", "Skip", "Cache"),
    *("Source", "Unit", "Parquet", "Jsonl", "ArrowIpc", "WebDataset", "Prepared", "prepare"),
    "load_job",
    *("Chat", "PromptCompletion", "PreferencePairs", "Split", "Eval"),
    *("Tokenize", "ByteTokenizer", "Pick", "per_row", "InProcesses", "Context"),
    *("start", "connect", "Client", "Loader", "Step", "Microbatch", "Embedded", "Processes", "Ray", "OverlordError"),
    *("Control", "locate", "DocumentOrigin"),
    *("join", "ElasticClient", "Seat"),
    *("DGraph", "Plan", "Samples", "Strategy", "ClientPlaceTree", "explain"),
    *("TransformerCost", "MeasuredCost", "LearnedCost", "load_cost"),
}
NAMESPACES = {
    "balancers": {"Balancer", "greedy", "karmarkar_karp"},
    "errors": {
        *("OverlordError", "SpecError", "StateError", "DataError", "SourceError", "RingError", "SchemaError", "BadRowError"),
        *("StorageError", "BufferTooSmallError", "WaitTimeoutError", "WorkerDiedError", "SharedUseError"),
        *("ServiceError", "ClosedError"),
    },
    "formats": {
        *("Csv", "Delta", "HuggingFace", "HuggingFaceFiles", "Iceberg", "Iterated", "Lance", "LitData", "MapDataset"),
        *("Mds", "MegatronBin", "TextLines", "EnergonBlend", "energon", "huggingface", "megatron", "torchtitan"),
    },
    "hdp": {"Offload", "split"},
    "mixtures": {"Catalog", "grouped", "measure", "read_table", "temperature", "unimax"},
    "pipelines": {"Pipeline", "StageFields", "level", "order", "timing"},
    "policies": {
        "BadRows",
        "Epochs",
        "Feedback",
        "MixtureProgress",
        "MultiplicativeWeights",
        "OutlierDelay",
        "Retry",
        "WarmUp",
    },
    "scaling": {
        *("ActorOptions", "Autoscale", "Budget", "Partition", "Partitioning", "ScalingPolicy", "Share", "partition"),
    },
    "strategies": {"hdp", "long_short", "multimodal", "plain"},
    "testing": {
        *("assert_resumes_exactly", "assert_same_stream", "assert_source_keeps_its_promises"),
        "assert_strategy_conserves",
    },
    "vision": {
        *("DecodeImage", "PatchGrid", "PlaceImages", "VisionTransformerCost", "encode", "fuse", "images_of"),
    },
}
EVERY = sorted([*FLAT, *(f"{space}.{name}" for space, names in NAMESPACES.items() for name in names)])


def resolve(name: str) -> Any:
    value: Any = ol
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_the_public_names_stand_once_in_the_stub():
    stub = ast.parse(Path(ol.__file__).with_suffix(".pyi").read_text())
    listed = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(listed) == ol.__all__ == sorted(FLAT | set(NAMESPACES))


def test_tab_completion_shows_the_public_names_and_nothing_else():
    code = "import overlord as ol, json; print(json.dumps(dir(ol)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == sorted([*ol.__all__, "__version__"])


@pytest.mark.parametrize(("space", "names"), NAMESPACES.items())
def test_a_namespace_has_its_names_and_no_others(space, names):
    module = resolve(space)
    assert isinstance(module, ModuleType)
    assert module.__name__ == f"overlord.{space}"
    listed = getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
    assert set(listed) == names


def test_a_type_checker_sees_every_public_name(tmp_path):
    pyright = Path(sys.executable).with_name("pyright")
    if not pyright.exists():
        pytest.skip("pyright is not installed")
    (tmp_path / "use.py").write_text("\n".join(["import overlord as ol", *(f"ol.{name}" for name in EVERY), "ol.Jobb"]))
    source = Path(ol.__file__).parent.parent
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(source)], "reportUnusedExpression": False}))
    command = [str(pyright), "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert told == ['"Jobb" is not a known attribute of module "overlord"']


@pytest.mark.parametrize("name", EVERY)
def test_every_public_name_exists(name):
    assert resolve(name).__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize("name", [*EVERY, *NAMESPACES])
def test_help_of_every_public_name_helps(name):
    doc = inspect.cleandoc(resolve(name).__doc__ or "")
    assert len(doc) > 20, f"ol.{name} has no docstring of its own"
    assert not re.match(rf"{name.rpartition('.')[2]}\(", doc), f"the docstring of ol.{name} repeats its signature"
    assert "See the module" not in doc


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Jobb'"):
        getattr(ol, "Jobb")  # noqa: B009 - type checkers know that it is not there


@pytest.mark.parametrize("use", ["", "; ol.Job, ol.start, ol.Parquet, ol.vision.DecodeImage, ol.Tokenize, ol.scaling"])
def test_importing_overlord_imports_no_heavy_library(use):
    code = f"import sys, overlord as ol{use}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


FIRST_BATCH = """
import sys
import overlord as ol
tokens = ol.Parquet(sys.argv[1], columns=["tokens"])
with ol.start(ol.Job(sources={"web": tokens}, batch=ol.Batch(samples=4, sequence_length=8))) as loader:
    next(loader.client(0))
print(*sys.modules)
"""
UNUSED = (
    "argparse",
    "importlib.metadata",
    "multiprocessing",
    "numpy.ma",
    "overlord.chunks.transforms.tokenize",
    "overlord.fleet.autoscaler",
    "overlord.loaders.autoscaling",
    "overlord.service.server",
    "pyarrow.compute",
    "pyarrow.flight",
)
"""What a first batch of token ids would wait for without need: 50 ms of the half second that it takes in all."""
MOST_FOR_A_BATCH = 190


def test_a_first_batch_of_token_ids_imports_only_what_it_needs(tmp_path):
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 64}), tmp_path / "tokens.parquet")
    command = [sys.executable, "-c", FIRST_BATCH, str(tmp_path / "tokens.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.split())
    assert imported.isdisjoint(UNUSED)
    assert sum(name.startswith("overlord.") for name in imported) <= MOST_FOR_A_BATCH


def test_every_error_is_an_overlord_error():
    errors = [getattr(ol.errors, name) for name in NAMESPACES["errors"]]
    assert all(issubclass(error, ol.OverlordError) for error in errors)
    assert issubclass(ol.errors.SpecError, ValueError)
