"""Data as other loaders and libraries keep it (docs/formats.md describes the readers), and batches as other frameworks want
them: names, dtypes and shapes (docs/trainers.md)."""

from overlord.batches.framework_layouts import huggingface, megatron, torchtitan
from overlord.sources.energon import EnergonBlend, energon
from overlord.sources.huggingface import HuggingFace, HuggingFaceFiles
from overlord.sources.iceberg import Iceberg
from overlord.sources.lake_tables import Delta, Lance
from overlord.sources.litdata import LitData
from overlord.sources.mds import Mds
from overlord.sources.megatron import MegatronBin
from overlord.sources.python_rows import Iterated, MapDataset
from overlord.sources.text_tables import Csv, TextLines

__all__ = [
    "Csv",
    "Delta",
    "EnergonBlend",
    "HuggingFace",
    "HuggingFaceFiles",
    "Iceberg",
    "Iterated",
    "Lance",
    "LitData",
    "MapDataset",
    "Mds",
    "MegatronBin",
    "TextLines",
    "energon",
    "huggingface",
    "megatron",
    "torchtitan",
]
