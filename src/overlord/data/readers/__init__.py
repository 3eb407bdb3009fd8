"""Sources made of files, one module per format."""

from overlord.data.object_store import Retry
from overlord.data.readers.arrow_ipc import ArrowIpc
from overlord.data.readers.jsonl import Jsonl
from overlord.data.readers.parquet import Parquet
from overlord.data.readers.webdataset import WebDataset

__all__ = ["ArrowIpc", "Jsonl", "Parquet", "Retry", "WebDataset"]
