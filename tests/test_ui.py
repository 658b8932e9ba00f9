"""The demo in Dagster's own UI, seen by a real browser."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
STAGES = ("clean", "embedding", "enriched", "published")

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed"
    ),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
    pytest.mark.skipif(
        importlib.util.find_spec("dagster_webserver") is None,
        reason="dagster-webserver is not installed",
    ),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def webserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A webserver over workspace.yaml, with an instance of its own."""
    home = tmp_path_factory.mktemp("dagster")
    shutil.copy(PROJECT / "definitions" / "dagster.yaml", home)
    port = _free_port()
    log = home / "webserver.log"
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "VANE_DEMO_DATA": str(home / "data"),
    }
    arguments = ["--workspace", "workspace.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster_webserver", *arguments],
            cwd=PROJECT,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            _wait(f"http://127.0.0.1:{port}/server_info", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        assert process.poll() is None, f"the webserver ended:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"the webserver did not answer in 90 s:\n{log.read_text()}")


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    profile = tempfile.mkdtemp(prefix="vc-", dir="/tmp")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            viewport={"width": 1600, "height": 900},
            args=[
                "--no-sandbox",
                "--headless",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield browser.pages[0]
        browser.close()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.mark.parametrize(
    ("group", "source"), [("stdlib_search", "stdlib_docs"), ("questions", "source")]
)
def test_asset_graph_draws_the_source_and_every_stage(webserver, page, group, source):
    page.goto(f"{webserver}/locations/definitions/asset-groups/{group}/lineage")
    for name in (source, *STAGES):
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    # The edges between them, as the graph draws them.
    assert page.locator("svg path").count() >= len(STAGES)


def test_asset_page_says_what_a_stage_is(webserver, page):
    page.goto(f"{webserver}/assets/docs/embedding")
    page.get_by_text("by all-MiniLM-L6-v2").first.wait_for(timeout=60_000)
    assert page.get_by_text("stdlib_search").count() >= 1
