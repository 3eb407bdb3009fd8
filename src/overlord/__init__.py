"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out.

Names are imported when they are first used, so that `import overlord` costs next to nothing wherever it is written.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlord.data.images import DecodeImage
    from overlord.data.readers import ArrowIpc, Jsonl, Parquet, Retry, WebDataset
    from overlord.data.transforms import ByteTokenizer, Context, InProcesses, Pick, Tokenize, per_row
    from overlord.engines.ray import ActorOptions, Ray
    from overlord.errors import (
        BadRowError,
        BufferTooSmallError,
        ClosedError,
        DataError,
        OverlordError,
        SchemaError,
        ServiceError,
        SourceError,
        SpecError,
        StateError,
        StorageError,
        WaitTimeoutError,
        WorkerDiedError,
    )
    from overlord.planning import strategies
    from overlord.planning.cost import TransformerCost
    from overlord.planning.dgraph import DGraph
    from overlord.planning.place_tree import ClientPlaceTree
    from overlord.planning.plan import Plan
    from overlord.roles.client import Client, Step
    from overlord.run import Loader, start
    from overlord.spec import BadRows, Batch, Job, Log, Mesh, Mixture, Source, Unit
    from overlord.transport.connect import connect

_HOMES = {
    "overlord.data.images": ["DecodeImage"],
    "overlord.data.readers": ["ArrowIpc", "Jsonl", "Parquet", "Retry", "WebDataset"],
    "overlord.data.transforms": ["ByteTokenizer", "Context", "InProcesses", "Pick", "Tokenize", "per_row"],
    "overlord.engines.ray": ["ActorOptions", "Ray"],
    "overlord.errors": [
        "BadRowError",
        "BufferTooSmallError",
        "ClosedError",
        "DataError",
        "OverlordError",
        "SchemaError",
        "ServiceError",
        "SourceError",
        "SpecError",
        "StateError",
        "StorageError",
        "WaitTimeoutError",
        "WorkerDiedError",
    ],
    "overlord.planning": ["strategies"],
    "overlord.planning.cost": ["TransformerCost"],
    "overlord.planning.dgraph": ["DGraph"],
    "overlord.planning.place_tree": ["ClientPlaceTree"],
    "overlord.planning.plan": ["Plan"],
    "overlord.roles.client": ["Client", "Step"],
    "overlord.run": ["Loader", "start"],
    "overlord.spec": ["BadRows", "Batch", "Job", "Log", "Mesh", "Mixture", "Source", "Unit"],
    "overlord.transport.connect": ["connect"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ActorOptions",
    "ArrowIpc",
    "BadRowError",
    "BadRows",
    "Batch",
    "BufferTooSmallError",
    "ByteTokenizer",
    "Client",
    "ClientPlaceTree",
    "ClosedError",
    "Context",
    "DGraph",
    "DataError",
    "DecodeImage",
    "InProcesses",
    "Job",
    "Jsonl",
    "Loader",
    "Log",
    "Mesh",
    "Mixture",
    "OverlordError",
    "Parquet",
    "Pick",
    "Plan",
    "Ray",
    "Retry",
    "SchemaError",
    "ServiceError",
    "Source",
    "SourceError",
    "SpecError",
    "StateError",
    "Step",
    "StorageError",
    "Tokenize",
    "TransformerCost",
    "Unit",
    "WaitTimeoutError",
    "WebDataset",
    "WorkerDiedError",
    "connect",
    "per_row",
    "start",
    "strategies",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'overlord' has no attribute {name!r}")
    module = import_module(home)
    value = getattr(module, name, None) or import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
