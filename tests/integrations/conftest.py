"""Frameworks are many and heavy. `make test` has Accelerate; `make integrations` has all, in an environment of their own."""

import os
from pathlib import Path

IN_MAKE_TEST = {"test_on_accelerate.py"}
"""Of the tests of frameworks, which are named test_on_*."""

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_on_*.py")
    if "OVERLORD_INTEGRATIONS" not in os.environ and path.name not in IN_MAKE_TEST
]
