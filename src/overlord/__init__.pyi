"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out.

Names are imported when they are first used, so that `import overlord` costs next to nothing wherever it is written.
"""

from overlord.arrange import strategies
from overlord.arrange.cost import MeasuredCost, TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.offload import Offload
from overlord.arrange.learned_cost import LearnedCost
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.plan import Plan
from overlord.arrange.vision.images import PatchGrid, VisionTransformerCost
from overlord.chunks.transforms import ByteTokenizer, Context, InProcesses, Pick, PlaceImages, Tokenize, per_row
from overlord.declare.batch import Batch
from overlord.declare.job import Job, Log
from overlord.declare.mesh import Mesh
from overlord.declare.mixture import Feedback, Mixture, MultiplicativeWeights
from overlord.declare.policies import OutlierDelay
from overlord.declare.source import BadRows, Source, Unit
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
from overlord.fleet.autoscaler import Autoscale
from overlord.fleet.sizing import partition
from overlord.loaders.autoscaling import ScalingPolicy
from overlord.loaders.model import Budget, Partition, Share
from overlord.loaders.partition import Partitioning
from overlord.media.images import DecodeImage
from overlord.messages import Step
from overlord.roles.client import Client
from overlord.runtime.ray import ActorOptions, Ray
from overlord.service.channel import connect
from overlord.service.run import Loader, start
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.jsonl import Jsonl
from overlord.sources.object_store import Retry
from overlord.sources.parquet import Parquet
from overlord.sources.webdataset import WebDataset
from overlord.steering.cost_file import load_cost

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
