"""Many sources from a table: one row for each, with its name, path, weight, group, transform and other options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from overlord.declare.job import Job
from overlord.declare.mixture import Mixture
from overlord.errors import SpecError
from overlord.jobfile.names import is_imported, is_public, nearest, public_values
from overlord.jobfile.values import JobPlace, PlainMapping, build, parse_yaml, reader_options, source_of
from overlord.jobfile.weighting import grouped

if TYPE_CHECKING:
    from overlord.declare.batch import Batch
    from overlord.declare.source import Source

Table = str | os.PathLike[str] | pa.Table | Mapping[str, Sequence[Any]] | Mapping[str, Mapping[str, Any]]
_OWN = ("name", "path", "weight", "group")


@dataclass(frozen=True, slots=True)
class Catalog:
    """Sources with their weights, as a table lists them."""

    sources: Mapping[str, Source]
    weights: Mapping[str, float]
    """Of each source; within its group, where the table has groups."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Group to the names of its sources."""
    group_weights: Mapping[str, float] = field(default_factory=dict[str, float])

    def mixture(self, weights: Mapping[str, float] | None = None, **options: Any) -> Mixture:
        """The mixture of the sources: the table's weights unless `weights` are given, shared out within groups where there
        are groups. `options` are those of `Mixture`."""
        given = self.weights if weights is None else weights
        if self.groups:
            members = {group: {name: given[name] for name in names} for group, names in self.groups.items()}
            given = grouped(members, self.group_weights)
        return Mixture(dict(given), **options)

    def job(self, *, batch: Batch, **options: Any) -> Job:
        """The job of all sources. `options` are those of `Job`."""
        if "mixture" not in options:
            options["mixture"] = self.mixture()
        return Job(sources=self.sources, batch=batch, **options)


def read_table(
    table: Table,
    *,
    transform: Any = None,
    transforms: Mapping[str, Any] | None = None,
    groups: Mapping[str, float] | None = None,
    **options: Any,
) -> Catalog:
    """The sources of a table, as a `Catalog`: `read_table("mixture.csv").job(batch=...)` is a job of all of them.

    `table` is a CSV or Parquet file, an Arrow table, {column: values} or {name: {column: value}}. It has the columns `name`
    and `path` (several paths with ; between them). It may have `weight` (1 unless given), `group`, `reader` (by the ending
    of the path unless given), `transform` (a name in `transforms`, `module:function` or a name of Overlord; several with ;
    between them), and any option of readers, such as `repeat` or `tokens`. An empty cell leaves an option out.

    `transform` is that of rows without one, and `options` are those of every source. `groups` has the weight of each group;
    unless given, groups have equal weights. Weights of sources are then shares within their group.
    """
    rows, where = _rows(table)
    _check_columns(rows, where[0], options)
    sources: dict[str, Source] = {}
    weights: dict[str, float] = {}
    members: dict[str, list[str]] = {}
    for place, row in zip(where, rows, strict=True):
        name = str(row.get("name") or "")
        if not name:
            raise place.error("a row of a table of sources needs a name and a path")
        if name in sources:
            raise place.error(f"the source {name!r} stands twice in the table")
        sources[name] = _source(row, place.at(name), transform=transform, transforms=transforms or {}, options=options)
        weights[name] = _weight(row.get("weight"), place.at(name))
        if row.get("group") not in (None, ""):
            members.setdefault(str(row["group"]), []).append(name)
        elif members or groups:
            raise place.error(f"the source {name!r} has no group, while others have: give every row one, or none")
    if members and sum(map(len, members.values())) < len(sources):
        raise where[0].error("some sources have a group and others have none: give every row one, or none")
    return Catalog(
        sources, weights, {group: tuple(names) for group, names in members.items()}, _shares(members, groups, where)
    )


def _check_columns(rows: Sequence[Mapping[str, Any]], place: JobPlace, options: Mapping[str, Any]) -> None:
    """Says which columns a table lacks or has too many. A reader of the user's own has options that nobody knows here."""
    found = list(dict.fromkeys(str(name) for row in rows for name in row))
    place = place if place.line is None else JobPlace(place.file, place.keys, 1)  # the head of a file
    known = dict.fromkeys((*_OWN, "reader", "transform", *reader_options()))
    listed = ", ".join(map(repr, found))
    needed = {"name": {"name"}, "path": {"path", "paths"}}
    if missing := [name for name, forms in needed.items() if not forms & set(found)]:
        fold = {name.strip().lower() for name in found}
        way_out = (
            "; names of columns are in lower case, without spaces around them"
            if missing[0] in fold
            else "; a table is divided by commas, or by tabs if it is called .tsv"
            if len(found) == 1 and re.search(r"[;|\t]", found[0])
            else nearest(missing[0], found)
        )
        raise place.error(f"a table of sources has the columns name and path, and this one has {listed}{way_out}")
    readers = {str(row.get("reader")) for row in rows} | {str(options.get("reader"))}
    filled = {str(name) for row in rows for name, value in row.items() if value not in (None, "")}
    unknown = next((name for name in found if name not in known and name in filled), None)
    if unknown is not None and not any(map(is_imported, readers)):
        own = ", ".join(map(repr, (*_OWN, "reader", "transform")))
        raise place.error(
            f"the column {unknown!r} is none that a table of sources has, and no option of a reader"
            f"{nearest(unknown, known) or '.'} It has {own} and options of readers"
        )


def _shares(
    members: Mapping[str, Sequence[str]], given: Mapping[str, float] | None, where: Sequence[JobPlace]
) -> dict[str, float]:
    if given is None:
        return dict.fromkeys(members, 1.0)
    for group in given:
        if group not in members:
            raise where[0].error(f"groups gives a weight to {group!r}, which no row has{nearest(group, members)}")
    if missing := [group for group in members if group not in given]:
        raise where[0].error(f"groups has no weight for {missing[0]!r}; it has {', '.join(given)}")
    return {group: float(given[group]) for group in members}


def _rows(table: Table) -> tuple[list[dict[str, Any]], list[JobPlace]]:
    """The rows, and where each stands."""
    if isinstance(table, (str, os.PathLike)):
        path = Path(os.path.expanduser(os.fspath(table)))
        rows = _read_file(path).to_pylist()
        first = 2 if path.suffix.lower() in (".csv", ".tsv") else 0  # a CSV file has a head
        name = str(path)
        where = [JobPlace(name, (), first + i) if first else JobPlace(f"{name}, row {i}") for i in range(len(rows))]
    elif isinstance(table, pa.Table):
        rows = table.to_pylist()
        where = [JobPlace(f"the table, row {i}") for i in range(len(rows))]
    elif isinstance(table, Mapping) and table and all(isinstance(value, Mapping) for value in table.values()):
        rows = [{"name": name} | dict(cast("Mapping[str, Any]", value)) for name, value in table.items()]
        where = [JobPlace("the table") for _ in rows]
    elif isinstance(table, Mapping):
        rows = pa.table({name: list(values) for name, values in table.items()}).to_pylist() if table else []
        where = [JobPlace(f"the table, row {i}") for i in range(len(rows))]
    else:
        raise SpecError(f"a table of sources is a CSV or Parquet file, an Arrow table or a dict, got {type(table).__name__}")
    if not rows:
        raise SpecError(f"{table if isinstance(table, (str, os.PathLike)) else 'the table'} has no rows: no sources")
    return rows, where


def _read_file(path: Path) -> pa.Table:
    if not path.is_file():
        raise SpecError(f"there is no table of sources {path}; it is a CSV or Parquet file with the columns name and path")
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(path)
        import pyarrow.csv as csv

        # As text: what a cell means is decided by the option that it is for.
        with path.open("rb") as file:
            head = file.readline().decode("utf-8-sig").strip()
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        names = [name.strip().strip('"') for name in head.split(delimiter)]
        return csv.read_csv(
            path,
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise SpecError(f"{path} cannot be read as a table of sources: {error}") from error


def _source(
    row: Mapping[str, Any], place: JobPlace, *, transform: Any, transforms: Mapping[str, Any], options: Mapping[str, Any]
) -> Source:
    given = {key: value for key, value in row.items() if key not in _OWN and value not in (None, "")}
    paths = row.get("path") if row.get("path") not in (None, "") else given.pop("paths", None)
    if paths in (None, ""):
        raise place.error(f"the source {place.keys[-1]!r} has no path")
    chosen = given.pop("transform", None)
    split = [each.strip() for each in paths.split(";")] if isinstance(paths, str) else list(paths)
    entries: dict[str, Any] = {"paths": split[0] if len(split) == 1 else split, **_plain(given)}
    objects = {key: value for key, value in options.items() if key not in given}
    if "reader" in objects and inspect.isclass(objects["reader"]):
        raise place.error("reader is a name, such as 'Parquet', got a class")
    plain = {key: value for key, value in objects.items() if isinstance(value, (str, int, float, bool, list, dict))}
    source = source_of(PlainMapping({**plain, **entries}, {}), place)
    others: dict[str, Any] = {key: value for key, value in objects.items() if key not in plain}
    found = transform if chosen is None else _transforms(chosen, transforms, place)
    if found is not None:
        others["transform"] = found
    return _with(source, others, place)


def _with(source: Source, options: Mapping[str, Any], place: JobPlace) -> Source:
    try:
        return replace(source, **options) if options else source
    except TypeError as error:
        raise place.error(f"{place.path}: {str(error).replace('.__init__()', '()')}") from error


def _transforms(text: Any, known: Mapping[str, Any], place: JobPlace) -> tuple[Callable[..., Any], ...]:
    names = [each.strip() for each in str(text).split(";") if each.strip()]
    found: list[Any] = []
    for name in names:
        if name in known:
            given = known[name]
            found += [given] if callable(given) else list(given)
        elif is_imported(name) or is_public(name):
            found.append(build(name, None, place))
        else:
            raise place.error(
                f"the transform {name!r} is none of transforms= ({', '.join(known) or 'which is empty'}) and not "
                f"module:function{nearest(name, [*known, *public_values()])}"
            )
    return tuple(found)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Cells of text as YAML reads them: true, 4, [a, b]."""
    return {key: parse_yaml(value, key) if isinstance(value, str) else value for key, value in row.items()}


def _weight(value: Any, place: JobPlace) -> float:
    if value in (None, ""):
        return 1.0
    try:
        return float(value)
    except (TypeError, ValueError):
        raise place.error(f"the weight of {place.keys[-1]!r} is a number, got {value!r}") from None
