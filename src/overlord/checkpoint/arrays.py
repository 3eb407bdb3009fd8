"""Describes arrays, Arrow values and tensors for a fingerprint: by their type, shape and bytes."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from overlord.runtime.transport import table_to_stream


def array_text(value: Any) -> str:
    kind = value.dtype
    flat = np.ascontiguousarray(value).reshape(-1)
    is_masked = "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray)
    mask = f" {bytes_digest(np.ma.getmaskarray(value).tobytes())}" if is_masked else ""
    described = kind.str if kind.fields is None else repr(kind.descr)
    return f"array {described} {value.shape} {bytes_digest(flat.view(np.uint8) if flat.size else b'')}{mask}"


def arrow_text(value: Any) -> str | None:
    import pyarrow as pa

    if isinstance(value, (pa.DataType, pa.Field, pa.Schema)):
        return f"arrow {value}"
    if isinstance(value, pa.Scalar):
        return f"scalar {value.type} {_table_digest(pa.table({'': pa.array([value.as_py()], value.type)}))}"
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return f"arrow {value.type} {_table_digest(pa.table({'': value}))}"
    if isinstance(value, (pa.Table, pa.RecordBatch)):
        table = value if isinstance(value, pa.Table) else pa.Table.from_batches([value])
        return f"table {table.schema} {_table_digest(table)}"
    if isinstance(value, pa.Buffer):
        return f"buffer {bytes_digest(value)}"
    if type(value).__name__ == "Expression":
        return f"expression {value}"
    return None


def _table_digest(table: Any) -> str:
    """Of a table's rows, however they lie in chunks and buffers."""
    import pyarrow as pa

    copied = table.take(pa.array(np.arange(table.num_rows))).combine_chunks()
    return bytes_digest(table_to_stream(copied))


def torch_text(value: Any) -> str | None:
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if len(flat) else b""
        return f"tensor {value.dtype} {tuple(value.shape)} {bytes_digest(data)}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, torch.Generator):
        return f"generator {bytes_digest(value.get_state().numpy())}"
    return None


def bytes_digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
