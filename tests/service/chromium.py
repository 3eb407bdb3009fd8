"""A real Chromium for the page of a run, driven by playwright. Tests that need it are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def skip_without_chromium() -> None:
    """Skip a test, and say what to install."""
    pytest.importorskip("playwright", reason="no playwright to drive a browser: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine, so the page was not tested in a browser: apt-get install chromium")


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=list(_QUIET))
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page at a URL. Fails if it asks anybody but its own service, or if its script fails."""
    wrong: list[str] = []
    settings: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}} | options
    context = started.new_context(**settings)
    context.set_default_timeout(30_000)
    page = context.new_page()
    origin = url.partition("#")[0]
    page.on("request", lambda request: None if request.url.startswith((origin, "data:")) else wrong.append(request.url))
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    try:
        page.goto(url)
        yield page
        assert wrong == []
    finally:
        context.close()
