"""`overlord schema`: the JSON schema of YAML job files, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from overlord.cli.options import add_option
from overlord.cli.output import console, write_json
from overlord.errors import SpecError
from overlord.jobfile.schema import job_schema

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the JSON schema of YAML job files. An editor with a YAML language server completes and checks a job whose "
        "first line is `# yaml-language-server: $schema=FILE`."
    )
    add_option(parser, "--write", help="write it to FILE instead")


def execute(options: argparse.Namespace) -> int:
    schema = job_schema()
    if options.write is None:
        write_json(schema)
        return 0
    try:
        options.write.write_bytes(orjson.dumps(schema, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise SpecError(f"the schema cannot be written to {options.write}: {error.strerror}") from error
    console().print(f"first line of a job: # yaml-language-server: $schema={options.write}", markup=False, soft_wrap=True)
    return 0
