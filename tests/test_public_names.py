"""What users may import, what importing it costs, and that no heavy library comes along."""

import subprocess
import sys

import overlord as ol

HEAVY = ("torch", "ray", "PIL", "simplejpeg", "obstore", "tiktoken", "tokenizers", "rich", "pandas")


def test_the_public_names_are_listed_once_and_all_exist():
    assert sorted(ol.__all__) == sorted(set(ol.__all__))
    assert all(hasattr(ol, name) for name in ol.__all__)


def test_importing_overlord_imports_no_heavy_library():
    code = f"import sys, overlord; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_is_an_overlord_error():
    errors = [getattr(ol, name) for name in ol.__all__ if name.endswith("Error")]
    assert all(issubclass(error, ol.OverlordError) for error in errors)
    assert issubclass(ol.SpecError, ValueError)
