"""The public names of Overlord, once each. `__init__.py` imports them when they are first used.

Names that most jobs use stand here. The others are in the modules that come first, each with its own list.
"""

from overlord import balancers as balancers
from overlord import errors as errors
from overlord import formats as formats
from overlord import hdp as hdp
from overlord import mixtures as mixtures
from overlord import pipelines as pipelines
from overlord import policies as policies
from overlord import scaling as scaling
from overlord import strategies as strategies
from overlord import testing as testing
from overlord import vision as vision
from overlord.arrange.cost import MeasuredCost as MeasuredCost
from overlord.arrange.cost import TransformerCost as TransformerCost
from overlord.arrange.explain import explain as explain
from overlord.arrange.graph import DGraph as DGraph
from overlord.arrange.learned_cost import LearnedCost as LearnedCost
from overlord.arrange.mesh_tree import ClientPlaceTree as ClientPlaceTree
from overlord.arrange.plan import Plan as Plan
from overlord.arrange.strategies import Strategy as Strategy
from overlord.chunks.transforms.apply import InProcesses as InProcesses
from overlord.chunks.transforms.chat import Chat as Chat
from overlord.chunks.transforms.chat import PreferencePairs as PreferencePairs
from overlord.chunks.transforms.chat import PromptCompletion as PromptCompletion
from overlord.chunks.transforms.outcome import Context as Context
from overlord.chunks.transforms.per_row import per_row as per_row
from overlord.chunks.transforms.pick import Pick as Pick
from overlord.chunks.transforms.split import Split as Split
from overlord.chunks.transforms.tokenize import ByteTokenizer as ByteTokenizer
from overlord.chunks.transforms.tokenize import Tokenize as Tokenize
from overlord.declare.batch import Batch as Batch
from overlord.declare.cache import Cache as Cache
from overlord.declare.evaluation import Eval as Eval
from overlord.declare.job import Job as Job
from overlord.declare.mesh import Mesh as Mesh
from overlord.declare.mixture import Mixture as Mixture
from overlord.declare.policies import Log as Log
from overlord.declare.policies import Skip as Skip
from overlord.declare.source import Source as Source
from overlord.declare.source import Unit as Unit
from overlord.errors import OverlordError as OverlordError
from overlord.jobfile.loading import load_job as load_job
from overlord.lineage.locating import locate as locate
from overlord.messages import DocumentOrigin as DocumentOrigin
from overlord.messages import Microbatch as Microbatch
from overlord.messages import Seat as Seat
from overlord.messages import Step as Step
from overlord.preparing.corpus import prepare as prepare
from overlord.runtime.embedded import Embedded as Embedded
from overlord.runtime.processes import Processes as Processes
from overlord.runtime.ray import Ray as Ray
from overlord.service.admin import Control as Control
from overlord.service.channel import connect as connect
from overlord.service.client import Client as Client
from overlord.service.elastic_client import ElasticClient as ElasticClient
from overlord.service.elastic_client import join as join
from overlord.service.loader import Loader as Loader
from overlord.service.run import start as start
from overlord.sources.arrow_ipc import ArrowIpc as ArrowIpc
from overlord.sources.jsonl import Jsonl as Jsonl
from overlord.sources.parquet import Parquet as Parquet
from overlord.sources.prepared import Prepared as Prepared
from overlord.sources.webdataset import WebDataset as WebDataset
from overlord.steering.cost_file import load_cost as load_cost
from overlord.stream.facts import Samples as Samples

__all__: list[str]
__version__: str
