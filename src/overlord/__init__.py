"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out.

The public names stand in `__init__.pyi`, once. They are imported when first used, so that `import overlord` costs next to
nothing wherever it is written.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path


def _read_homes() -> dict[str, str]:
    """The module that each public name is imported from, as the stub says."""
    stub = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, _ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOME_OF = _read_homes()
__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll] - checkers read the stub


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # it searches the whole environment, so only on request

        return version("overlord-dataloader")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'overlord' has no attribute {name!r}")
    # A name from the package itself is one of its modules.
    value = _import_module(f"{home}.{name}") if home == __name__ else getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and nothing else, for tab completion."""
    return [*__all__, "__version__"]
