"""A run whose loaders are on another node than its constructor, and whose steps do not fit into the cluster's object store.

    python -m tests.runtime.small_store

A program of its own, since a process can be connected to one cluster only. Says what it found as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from typing import Any

import overlord as ol
from tests.faults.comparison import undisturbed
from tests.faults.nodes import OTHERS, Nodes
from tests.faults.on_ray import health_reports
from tests.faults.trainer import digest
from tests.small_sources import Numbered, job_of

_STORE_BYTES = 76 << 20  # of a node; Ray starts none with less than 75 MiB
_STEPS = 3
_STEP_TOKENS = 14 << 20  # three steps, 4 bytes a token: 168 MiB, and both nodes have 152
_ROWS_OF_A_UNIT = 2000


def facts() -> dict[str, Any]:
    warnings: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    heard = Heard(logging.WARNING)
    logging.getLogger("overlord").addHandler(heard)
    source = Numbered(rows=160_000, unit_rows=_ROWS_OF_A_UNIT, longest=990, first=1)
    job = job_of({"a": source}, ol.Batch(tokens=_STEP_TOKENS, sequence_length=1 << 16), num_workers=1)
    nodes = Nodes(1, store_bytes=_STORE_BYTES)
    try:
        engine = ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions(labels=OTHERS))
        with ol.start(job, engine=engine) as loader:
            client = loader.client(0, timeout_s=90)
            got = [[digest(next(client))] for _ in range(_STEPS)]
            reports = health_reports(engine)
            use = loader.report().store
    finally:
        nodes.close()
    return {
        "is_apart": reports["loaders/0"].node != reports["constructor/0"].node,
        "limit": None if use is None else use.limit_bytes,
        "warned": [text for text in warnings if "the object store of the cluster has" in text],
        "is_same": got == undisturbed(job, _STEPS),
    }


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        found = facts()
    print(json.dumps(found))
