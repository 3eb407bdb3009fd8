"""How long it takes to trace a step, and to find a document, in a long run of many sources; what recording it costs.

    python -m bench lineage [--steps 100000] [--sources 300] [--folder FOLDER] [--json]

A run of `--sources` Parquet files draws `--steps` steps of 64 documents with a log. Then `overlord trace`, `explain` and
`find` answer from that log, each in a process of its own: seconds and memory are those of the whole process, with the start
of Python. In the end `explain` answers without the log, twice. With `--folder` the files and the log stay there, and the
next call begins with the questions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from bench.telling import parser_of

ROWS, SAMPLES = 2000, 64

JOB = """
import overlord as ol
from pathlib import Path

files = sorted(Path({folder!r}).glob("*.parquet"))
job = ol.Job(
    sources={{file.stem: ol.Parquet(file) for file in files}},
    batch=ol.Batch(samples={samples}, sequence_length=512),
    mixture=ol.Mixture({{file.stem: 1 + i % 7 for i, file in enumerate(files)}}),
    mesh=ol.Mesh(dp=8),
    num_workers=0,
)
"""


@dataclass(frozen=True, slots=True)
class Answered:
    question: str
    seconds: float
    cpu_s: float
    peak_mib: float


def make_job(folder: Path, num_sources: int) -> Path:
    rng = np.random.default_rng(0)
    for number in range(num_sources):
        lengths = rng.integers(5, 60, ROWS)
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        values = rng.integers(1, 1000, offsets[-1]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
        pq.write_table(pa.table({"tokens": tokens}), folder / f"s{number:03}.parquet", row_group_size=500)
    path = folder / "many_sources_job.py"
    path.write_text(JOB.format(folder=str(folder), samples=SAMPLES))
    return path


def draw(path: Path, log: Path, steps: int, lineage: bool = True) -> float:
    """Draw the steps, and return the CPU seconds that it took. No payload is built: that is what a planner does."""
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    began = time.process_time()
    with ol.start(declared["job"], log=ol.Log(log, sync_s=30, lineage=lineage)) as loader:
        loader.plan(steps - 1)
    return time.process_time() - began


MEASURED = """
import sys
from overlord.cli import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stderr.write(peak.split()[1])
sys.exit(code)
"""


def ask(*arguments: object) -> Answered:
    """Run a command, and measure its process."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    began, before = time.monotonic(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()
    seconds = time.monotonic() - began
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    verb, _, *rest = map(str, arguments)
    question = " ".join([verb, *(word for word in rest if word != rest[-1])])
    return Answered(question, seconds, cpu_s, int(done.stderr.split()[-1]) / 1024)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--sources", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        path, log = folder / "many_sources_job.py", folder / "log"
        figures: dict[str, float] = {}
        if not path.exists():
            path = make_job(folder, given.sources)
            figures["draw_cpu_s"] = draw(path, log, given.steps)
        few = min(given.steps, 2000)
        without = min(draw(path, Path(scratch) / f"without{i}", few, lineage=False) for i in range(3))
        recorded = min(draw(path, Path(scratch) / f"with{i}", few) for i in range(3))
        figures["recording_ms_per_step"] = 1000 * (recorded - without) / few
        size = sum(file.stat().st_size for file in (log / "lineage").iterdir())
        figures["bytes_per_document"] = size / (given.steps * SAMPLES)
        last = given.steps - 1
        answers = [
            ask("trace", path, "--step", step, *options, "--log", log)
            for step, options in ((0, ()), (last // 2, ("--rank", 3)), (last, ()), (last, ("--rank", 3)))
        ]
        answers.append(ask("explain", path, "--step", last, "--log", log))
        for source, row in ((0, 1234), (150 % given.sources, 7), (given.sources - 1, 1999)):
            name = f"s{source:03}"
            answers.append(ask("find", path, "--source", name, "--file", f"{name}.parquet", "--row", row, "--log", log))
        # Without a log: the first question draws the steps, the next is answered from the cache.
        answers += [ask("explain", path, "--step", last, "--cache", Path(scratch) / "cache") for _ in range(2)]
    if given.json:
        print(json.dumps({**figures, "answers": [asdict(answer) for answer in answers]}))
        return 0
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    for answer in answers:
        print(f"{answer.question:60} {answer.seconds:6.2f} s  {answer.cpu_s:6.2f} CPU-s  {answer.peak_mib:6.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
