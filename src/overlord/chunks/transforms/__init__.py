"""Transforms: functions over an Arrow table, run on each chunk of a source.

A transform is any function `f(table) -> table` or `f(table, context) -> table`. It must be deterministic:
randomness comes from `context.rng(row)`. It may drop rows or make many out of one; `outcome.py` says how lineage is kept. It
must treat rows independently of each other, since it may be run again on part of a table to find a bad row.
"""

from overlord.chunks.transforms.apply import InProcesses
from overlord.chunks.transforms.chat import Chat, PreferencePairs, PromptCompletion
from overlord.chunks.transforms.outcome import Context
from overlord.chunks.transforms.per_row import per_row
from overlord.chunks.transforms.pick import Pick
from overlord.chunks.transforms.place_images import PlaceImages
from overlord.chunks.transforms.split import Split
from overlord.chunks.transforms.tokenize import ByteTokenizer, Tokenize

__all__ = [
    "ByteTokenizer",
    "Chat",
    "Context",
    "InProcesses",
    "Pick",
    "PlaceImages",
    "PreferencePairs",
    "PromptCompletion",
    "Split",
    "Tokenize",
    "per_row",
]
