"""Resized pictures are the same on processors that can do less than this one."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from overlord.media.resample import resize


def digest() -> str:
    """Of pictures of many shapes, resized as a whole to several sizes, none to less than a quarter."""
    rng, found = np.random.default_rng(0), hashlib.sha256()
    for _ in range(40):
        height, width = rng.integers(40, 900, 2).tolist()
        picture = np.cumsum(rng.integers(-9, 10, (height, width, 3)), axis=1).astype(np.uint8)
        for size in ((336, 336), (224, 448), (900, 500)):
            found.update(resize(picture, size, (0, height), (0, width)).tobytes())
    return found.hexdigest()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these switches are for x86")
@pytest.mark.parametrize(
    "without",
    [{"OPENCV_CPU_DISABLE": "AVX2,AVX512-SKX,FP16"}, {"OPENCV_IPP": "disabled"}],
    ids=["AVX2", "Intel's primitives"],
)
def test_pictures_are_the_same_on_a_processor_without(without):
    command = [sys.executable, "-c", "from tests.media.test_other_processors import digest; print(digest())"]
    other = subprocess.run(command, env={**os.environ, **without}, capture_output=True, text=True, check=True, timeout=120)
    assert other.stdout.strip() == digest()
