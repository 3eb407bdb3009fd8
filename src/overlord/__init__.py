"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out.

Names are imported when they are first used, so that `import overlord` costs next to nothing wherever it is written.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlord.cost_file import load_cost
    from overlord.data.images import DecodeImage
    from overlord.data.readers import ArrowIpc, Jsonl, Parquet, Retry, WebDataset
    from overlord.data.transforms import ByteTokenizer, Context, InProcesses, Pick, PlaceImages, Tokenize, per_row
    from overlord.engines.ray import ActorOptions, Ray
    from overlord.errors import (
        BadRowError,
        BufferTooSmallError,
        ClosedError,
        DataError,
        OverlordError,
        SchemaError,
        ServiceError,
        SharedUseError,
        SourceError,
        SpecError,
        StateError,
        StorageError,
        WaitTimeoutError,
        WorkerDiedError,
    )
    from overlord.outlier_delay import OutlierDelay
    from overlord.planning import strategies
    from overlord.planning.cost import TransformerCost
    from overlord.planning.dgraph import DGraph
    from overlord.planning.hdp.offload import Offload
    from overlord.planning.images.vision import PatchGrid, VisionTransformerCost
    from overlord.planning.learned_cost import LearnedCost
    from overlord.planning.learning.feedback import Feedback, MultiplicativeWeights
    from overlord.planning.loaders.autoscaling import ScalingPolicy
    from overlord.planning.loaders.partitioning import Partitioning
    from overlord.planning.loaders.scaling import Budget, Partition, Share
    from overlord.planning.measured_cost import MeasuredCost
    from overlord.planning.pipeline import Pipeline
    from overlord.planning.place_tree import ClientPlaceTree
    from overlord.planning.plan import Plan
    from overlord.roles.autoscaler import Autoscale
    from overlord.roles.client import Client, Step
    from overlord.run import Loader, start
    from overlord.sizing import partition
    from overlord.spec import BadRows, Batch, Job, Log, Mesh, Mixture, Source, Unit
    from overlord.transport.connect import connect

_HOMES = {
    "overlord.cost_file": ["load_cost"],
    "overlord.data.images": ["DecodeImage"],
    "overlord.data.readers": ["ArrowIpc", "Jsonl", "Parquet", "Retry", "WebDataset"],
    "overlord.data.transforms": ["ByteTokenizer", "Context", "InProcesses", "Pick", "PlaceImages", "Tokenize", "per_row"],
    "overlord.engines.ray": ["ActorOptions", "Ray"],
    "overlord.errors": [
        "BadRowError",
        "BufferTooSmallError",
        "ClosedError",
        "DataError",
        "OverlordError",
        "SchemaError",
        "ServiceError",
        "SharedUseError",
        "SourceError",
        "SpecError",
        "StateError",
        "StorageError",
        "WaitTimeoutError",
        "WorkerDiedError",
    ],
    "overlord.outlier_delay": ["OutlierDelay"],
    "overlord.planning": ["strategies"],
    "overlord.planning.loaders.autoscaling": ["ScalingPolicy"],
    "overlord.planning.cost": ["TransformerCost"],
    "overlord.planning.measured_cost": ["MeasuredCost"],
    "overlord.planning.dgraph": ["DGraph"],
    "overlord.planning.learning.feedback": ["Feedback", "MultiplicativeWeights"],
    "overlord.planning.learned_cost": ["LearnedCost"],
    "overlord.planning.loaders.partitioning": ["Partitioning"],
    "overlord.planning.pipeline": ["Pipeline"],
    "overlord.planning.hdp.offload": ["Offload"],
    "overlord.planning.place_tree": ["ClientPlaceTree"],
    "overlord.planning.plan": ["Plan"],
    "overlord.planning.loaders.scaling": ["Budget", "Partition", "Share"],
    "overlord.roles.autoscaler": ["Autoscale"],
    "overlord.planning.images.vision": ["PatchGrid", "VisionTransformerCost"],
    "overlord.roles.client": ["Client", "Step"],
    "overlord.run": ["Loader", "start"],
    "overlord.sizing": ["partition"],
    "overlord.spec": ["BadRows", "Batch", "Job", "Log", "Mesh", "Mixture", "Source", "Unit"],
    "overlord.transport.connect": ["connect"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ActorOptions",
    "ArrowIpc",
    "Autoscale",
    "BadRowError",
    "BadRows",
    "Batch",
    "Budget",
    "BufferTooSmallError",
    "ByteTokenizer",
    "Client",
    "ClientPlaceTree",
    "ClosedError",
    "Context",
    "DGraph",
    "DataError",
    "DecodeImage",
    "Feedback",
    "InProcesses",
    "Job",
    "Jsonl",
    "LearnedCost",
    "Loader",
    "Log",
    "MeasuredCost",
    "Mesh",
    "Mixture",
    "MultiplicativeWeights",
    "Offload",
    "OutlierDelay",
    "OverlordError",
    "Parquet",
    "Partition",
    "Partitioning",
    "PatchGrid",
    "Pick",
    "Pipeline",
    "PlaceImages",
    "Plan",
    "Ray",
    "Retry",
    "ScalingPolicy",
    "SchemaError",
    "ServiceError",
    "Share",
    "SharedUseError",
    "Source",
    "SourceError",
    "SpecError",
    "StateError",
    "Step",
    "StorageError",
    "Tokenize",
    "TransformerCost",
    "Unit",
    "VisionTransformerCost",
    "WaitTimeoutError",
    "WebDataset",
    "WorkerDiedError",
    "connect",
    "load_cost",
    "partition",
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
