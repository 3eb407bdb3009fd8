"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out."""

from overlord.data.images import DecodeImage
from overlord.data.readers import ArrowIpc, Jsonl, Parquet, WebDataset
from overlord.data.transforms import ByteTokenizer, Context, InProcesses, Pick, Tokenize, per_row
from overlord.errors import (
    BadRowError,
    BufferTooSmallError,
    ClosedError,
    DataError,
    OverlordError,
    SchemaError,
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
from overlord.spec import BadRows, Batch, Job, Mesh, Mixture, Source, Unit

__all__ = [
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
    "Mesh",
    "Mixture",
    "OverlordError",
    "Parquet",
    "Pick",
    "Plan",
    "SchemaError",
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
    "per_row",
    "start",
    "strategies",
]
