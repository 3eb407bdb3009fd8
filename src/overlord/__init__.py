"""Overlord: a data loader for training large foundation models. Many sources in, the right slice for every GPU out.

The public names stand in `__init__.pyi`, once. They are imported when first used, so that `import overlord` costs next to
nothing wherever it is written.
"""

import ast
from importlib import import_module
from pathlib import Path


def _read_homes() -> dict[str, str]:
    """The module that each public name is imported from, as the stub says."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOME_OF = _read_homes()
__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll] - checkers read the stub


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # it searches the whole environment, so only when asked for

        return version("overlord-dataloader")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'overlord' has no attribute {name!r}")
    module = import_module(home)
    value = getattr(module, name, None) or import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
