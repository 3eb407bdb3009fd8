"""What benchmarks with options of their own share: the option --json, and telling results by it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Described as written, with --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="every figure, for machines")
    return parser


def tell(results: Sequence[Any], show: Callable[[Any], None], as_json: bool) -> None:
    """Print results, which are dataclasses: as JSON, or each by `show`."""
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    for result in results:
        show(result)
