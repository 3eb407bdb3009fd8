"""What users may import, what importing it costs, and that no heavy library comes along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import overlord as ol

HEAVY = ("torch", "ray", "PIL", "simplejpeg", "obstore", "tiktoken", "tokenizers", "rich", "pandas", "pyarrow.flight")


def test_the_public_names_stand_once_in_the_stub():
    stub = ast.parse(Path(ol.__file__).with_suffix(".pyi").read_text())
    listed = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(listed) == ol.__all__ == sorted(set(listed))
    assert set(ol.__all__) <= set(dir(ol))


@pytest.mark.parametrize("name", ol.__all__)
def test_every_public_name_exists(name):
    assert getattr(ol, name).__name__.rpartition(".")[2] == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Jobb'"):
        ol.Jobb  # noqa: B018


@pytest.mark.parametrize("use", ["", "; ol.Job, ol.start, ol.Parquet, ol.DecodeImage, ol.Tokenize"])
def test_importing_overlord_imports_no_heavy_library(use):
    code = f"import sys, overlord as ol{use}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_is_an_overlord_error():
    errors = [getattr(ol, name) for name in ol.__all__ if name.endswith("Error")]
    assert all(issubclass(error, ol.OverlordError) for error in errors)
    assert issubclass(ol.SpecError, ValueError)
