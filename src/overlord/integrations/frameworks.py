"""Imports a framework when an integration needs it, and says clearly when it is missing or of a release that the integration
was not written for."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from overlord.errors import SpecError

SUPPORTED: dict[str, tuple[str, str]] = {
    "accelerate": ("1.10", "2"),
    "deepspeed": ("0.18", "1"),
    "lightning": ("2.5", "3"),
    "megatron-core": ("0.16", "1"),
    "ray": ("2.50", "3"),
    "torchft": ("0.2", "1"),
    "torchtitan": ("0.3", "0.4"),
    "transformers": ("5.0", "6"),
    "trl": ("1.0", "2"),
}
"""The first release of each framework that is supported, and the first one that is not. `make integrations` tests one of
them: the one in constraints/integrations.txt."""


def require(framework: str, module: str | None = None) -> Any:
    """Import a module of a framework, by default the one of its name. ModuleNotFoundError if the framework is not installed,
    SpecError if its release is not supported."""
    least, below = SUPPORTED[framework]
    found = _installed(framework)
    if found is None:
        raise ModuleNotFoundError(
            f"this integration needs {framework}: pip install '{framework}>={least},<{below}'", name=framework
        )
    if not _numbers(least) <= _numbers(found) < _numbers(below):
        raise SpecError(
            f"{framework} {found} is installed, and this integration is written for releases from {least} to below {below}: "
            f"pip install '{framework}>={least},<{below}', or use overlord.trainer.attach, which needs torch alone"
        )
    return importlib.import_module(module or framework.replace("-", "."))


def _installed(framework: str) -> str | None:
    """The release of a framework, None if it is missing. One that runs from a checkout, as Megatron-LM does, is known to no
    installer and says itself which release it is."""
    try:
        return metadata.version(framework)
    except metadata.PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(framework.replace("-", ".")), "__version__", None)
    except ModuleNotFoundError:
        return None


def is_before(framework: str, release: str) -> bool:
    """Whether the installed release of a framework is older than this one."""
    found = _installed(framework)
    return found is not None and _numbers(found) < _numbers(release)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
