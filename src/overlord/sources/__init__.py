"""Sources made of files, one module per format."""

from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.jsonl import Jsonl
from overlord.sources.object_store import Retry
from overlord.sources.parquet import Parquet
from overlord.sources.webdataset import WebDataset

__all__ = ["ArrowIpc", "Jsonl", "Parquet", "Retry", "WebDataset"]
