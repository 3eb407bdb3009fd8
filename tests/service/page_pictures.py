"""Takes the pictures of docs/page.md: `python -m tests.service.page_pictures`. Needs Chromium, and takes about a minute."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import overlord as ol
from tests.service.chromium import browser, opened
from tests.service.test_page_in_chromium import trained
from tests.small_sources import Numbered, job_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_WEIGHTS = {"web": 0.42, "code": 0.2, "books": 0.14, "papers": 0.1, "forums": 0.08, "wiki": 0.04, "math": 0.02}
JOB = job_of(
    {
        name: Numbered(rows=4000, unit_rows=40, first=1 + 10_000 * i, longest=300 + 500 * i)
        for i, name in enumerate(_WEIGHTS)
    },
    mixture=ol.Mixture(_WEIGHTS, unit="tokens"),
    batch=ol.Batch(tokens=1 << 17, sequence_length=4096),
    mesh=ol.Mesh(dp=8, tp=2),
    strategy=ol.strategies.long_short(ol.TransformerCost(per_token=1.0, per_length_squared=0.002, constant=0.0)),
)


def main(seconds: float = 40.0) -> None:
    """A run of 16 ranks in two worker processes, of which one is killed."""
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as log,
        ol.start(JOB, engine=ol.Processes(2), log=log) as loader,
        trained(loader, 0.25, slow_rank=None),
    ):
        url = loader.page()
        with browser() as started:
            with opened(started, url, viewport={"width": 1180, "height": 1130}) as page:
                page.wait_for_timeout(seconds * 400)
                os.kill(loader.metrics().roles["loaders/0"].process or 0, signal.SIGKILL)
                loader.set_weights({**_WEIGHTS, "code": 0.4})
                page.wait_for_timeout(seconds * 600)
                page.screenshot(path=IMAGES / "page-run.png")
            _take(started, url, "page-step.png", "2", viewport={"width": 1280, "height": 860}, color_scheme="dark")
            _take(started, url, "page-phone.png", "1", viewport={"width": 390, "height": 844}, device_scale_factor=1.5)


def _take(started: Browser, url: str, name: str, key: str, **options: object) -> None:
    with opened(started, url, **options) as page:
        page.wait_for_selector("#verdict[class]")
        time.sleep(2)
        page.keyboard.press(key)
        if key == "2":
            page.locator("#documents tbody tr").first.wait_for()
            page.locator("#step-chart").click(position={"x": 700, "y": 60})
            page.wait_for_timeout(800)
            page.locator("#documents tbody tr").nth(0).click()
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / name)


if __name__ == "__main__":
    main()
