"""`overlord prepare`: write the rows of a job's sources after their transforms, so that runs need not make them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from overlord.cli.options import add_job_argument, add_option, at_least
from overlord.cli.output import console, printable, short, size, table, write_json
from overlord.errors import SpecError
from overlord.jobfile.loading import YAML, load_job
from overlord.jobfile.printing import as_python, as_yaml
from overlord.preparing.corpus import PrepareProgress, folder_name, prepare
from overlord.sources.prepared import Prepared

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from types import TracebackType

    from rich.console import Console
    from rich.progress import TaskID

    from overlord.declare.job import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the rows of each source after its transforms as Parquet, with a manifest, to a folder of its own under DIR. "
        "ol.Prepared(DIR/NAME) reads them: the same stream, without the cost of the transforms. What is there already is "
        "not made again, so a command that was stopped or killed continues where it was."
    )
    add_job_argument(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="write to this folder")
    add_option(
        parser, "--write", help="write the job that reads what was made to FILE (.yaml or .py), which must not be there"
    )
    add_option(parser, "--source", action="append", help="prepare this source only; may be repeated (default: every source)")
    add_option(parser, "--processes", type=at_least(1), help="make rows in N worker processes (default: one per core)")
    add_option(
        parser,
        "--ray",
        help="make rows on the Ray cluster at ADDRESS, or on a local one without it; its nodes must see the files and DIR",
    )
    parser.add_argument(
        "--pack",
        type=at_least(1),
        metavar="L",
        help="pack documents into rows of L tokens, for other trainers: another corpus, not the stream of the job",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace rows that were prepared from another declaration of the source"
    )


def execute(options: argparse.Namespace) -> int:
    if options.write is not None:
        _check_job_file(options.write)
    job = only_sources(load_job(options.job), options.source)
    with _Bar(console(stderr=True)) as bar:
        done = prepare(
            job,
            options.to,
            num_processes=options.processes,
            overwrite=options.overwrite,
            ray="local" if options.ray == "" else options.ray,
            pack=options.pack,
            on_progress=bar.show,
        )
    if options.write is not None:
        _write_job(done, options.write)
    folder = Path(options.to).expanduser()
    left = {name: len(source.transforms) for name, source in done.sources.items()}
    found = {name: _summary(folder / folder_name(name), left[name]) for name in done.sources}
    if options.json:
        write_json({"ok": True, "sources": found, "job": None if options.write is None else str(options.write)})
    else:
        _print(found, options.write)
    return 0


def _check_job_file(path: Path) -> None:
    if path.exists():
        raise SpecError(f"{path} is there already; name another file for the job")
    if path.suffix.lower() not in (*YAML, ".py"):
        raise SpecError(f"a job is a Python file or a YAML file, and {path} does not end in .py, .yaml or .yml")


def _write_job(job: Job, path: Path) -> None:
    try:
        text = as_python(job) if path.suffix.lower() == ".py" else as_yaml(job)
    except SpecError as error:
        error.add_note(f"the rows are prepared, and only the job was not written to {path}")
        raise
    path.write_text(text)


class _Bar:
    """A progress bar on a terminal; elsewhere a line for each tenth of a source."""

    def __init__(self, out: Console) -> None:
        self._console = out
        self._bars: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeRemainingColumn(),
            console=out,
        )

    def __enter__(self) -> _Bar:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, now: PrepareProgress) -> None:
        counts = f"{short(now.num_rows)} rows, {short(now.num_tokens)} tokens"
        if self._console.is_terminal:
            if now.source not in self._bars:
                self._bars[now.source] = self._progress.add_task(printable(now.source), counts=counts)
            self._progress.update(self._bars[now.source], completed=now.done_bytes, total=now.all_bytes, counts=counts)
            return
        tenth = 10 * now.done_bytes // max(now.all_bytes, 1)
        if tenth > self._tenths.get(now.source, 0):
            self._tenths[now.source] = tenth
            text = f"preparing {printable(now.source)}: {10 * tenth} %, {counts}"
            self._console.print(text, soft_wrap=True, markup=False)


def only_sources(job: Job, names: list[str] | None) -> Job:
    """The job with these of its sources alone; all unless given."""
    if not names:
        return job
    if unknown := [name for name in names if name not in job.sources]:
        raise SpecError(f"there is no source {unknown[0]!r}; the job's sources are {', '.join(map(repr, job.sources))}")
    return replace(job, sources={name: job.sources[name] for name in names}, mixture=None, skip=())


def _summary(folder: Path, transforms_left: int) -> dict[str, Any]:
    manifest = Prepared(str(folder)).manifest()
    return {
        "folder": str(folder),
        "packed": manifest.packed,
        "units": manifest.num_units,
        "rows": manifest.num_rows,
        "tokens": manifest.num_tokens,
        "bad_rows": manifest.num_bad_rows,
        "bytes": sum(part.num_bytes for part in manifest.parts),
        "files": len(manifest.parts),
        "fingerprint": manifest.fingerprint,
        "transforms": manifest.transform_names,
        "transforms_left": transforms_left,
    }


def _print(found: Mapping[str, Mapping[str, Any]], written: Path | None) -> None:
    out = console()
    rows = [
        (
            name,
            entry["folder"],
            f"{entry['rows']:,}",
            "?" if entry["tokens"] is None else f"{entry['tokens']:,}",
            f"{entry['files']:,}",
            size(entry["bytes"]),
            f"{entry['bad_rows']:,}",
        )
        for name, entry in found.items()
    ]
    out.print(table("source", "<folder", "rows", "tokens", "files", "bytes", "bad rows", rows=rows))
    for name, entry in found.items():
        if entry["transforms_left"]:
            text = f"source {name!r}: keep its last {entry['transforms_left']} transforms, which depend on the epoch"
            out.print(text, soft_wrap=True, markup=False)
    if written is not None:
        out.print(f"the job that reads it is in {written}", markup=False, soft_wrap=True)
    elif any(entry["packed"] for entry in found.values()):
        out.print("read packed rows with ol.Parquet('FOLDER/part-*.parquet')", markup=False)
    else:
        out.print(
            "read a source with ol.Prepared(FOLDER, ...): its other options stay as they are; --write FILE writes the job",
            markup=False,
            soft_wrap=True,
        )
