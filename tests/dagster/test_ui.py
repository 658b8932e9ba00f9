"""The demo in Dagster's own UI, seen by a real browser."""

from __future__ import annotations

import importlib.util
import os
import re
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

from support.dagster_dev import DagsterDev
from support.data import write_source
from support.paths import REPOSITORY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
CLICKED = """
import dagster as dg
import vane_dagster as vd


def measure(batch):
    return {{"length": [len(text) for text in batch["text"].to_pylist()]}}


texts = vd.Pipeline(
    "texts",
    source=vd.parquet("{root}/src/{{partition_key}}"),
    id="id",
    partitions_def=dg.StaticPartitionsDefinition(["monday"]),
    group_name="texts",
)
clean = texts.project("clean", {{"text": "trim(text)"}})
clean.map_batches("length", measure, schema={{"length": "BIGINT"}}, columns=["text"])
defs = dg.Definitions(
    assets=[texts.build_source(group_name="texts"), texts.build_assets()],
    resources={{
        "compute": vd.LocalCompute(num_cpus=1),
        "store": vd.FragmentStore(root="{root}/store"),
    }},
    executor=dg.in_process_executor,
)
"""
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
    shutil.copy(REPOSITORY / "definitions" / "dagster.yaml", home)
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
            cwd=REPOSITORY,
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser with a profile of its own. Starting one takes longer than reading a page."""
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
        yield browser
        browser.close()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def page(browser) -> Iterator[Any]:
    opened = browser.new_page()
    yield opened
    opened.close()


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


@pytest.fixture
def texts(tmp_path) -> Iterator[DagsterDev]:
    """A small pipeline in a ``dagster dev`` of its own, with nothing materialized."""
    write_source(tmp_path / "src" / "monday", {"id": [1, 2, 3], "text": ["a", " bb ", "ccc"]})
    (tmp_path / "definitions.py").write_text(CLICKED.format(root=tmp_path))
    dev = DagsterDev(tmp_path, forks_runs=True)
    dev.start()
    yield dev
    dev.stop()


def test_partition_is_materialized_by_clicking(texts, page):
    """From the button to the partition's numbers, its rows, where they are from, and checks."""
    base = f"http://127.0.0.1:{texts.port}/assets/texts/length"
    texts.succeeded(texts.launch(["texts/clean"], "monday"))
    page.goto(base)
    page.get_by_role("button", name=re.compile("Materialize")).first.click(timeout=60_000)
    page.get_by_role("button", name="All", exact=True).click(timeout=60_000)
    page.get_by_role("button", name=re.compile("Launch")).last.click(timeout=60_000)
    texts.wait(
        lambda: texts.checks("texts/length")["null_rate"] == {"monday": "SUCCEEDED"},
        "the stage is materialized and its checks have passed",
    )

    page.goto(f"{base}?view=partitions&partition=monday")
    page.get_by_text("fragments_computed").first.wait_for(timeout=60_000)
    page.get_by_text("Materialized (1)").first.wait_for(timeout=60_000)
    page.get_by_text("Failed (0)").first.wait_for(timeout=60_000)
    # The table of the column schema, and that of the sample rows.
    page.get_by_text("from texts/clean: text", exact=True).first.wait_for(timeout=60_000)
    assert texts.lineage("texts/length")["length"] == ["texts/clean: text"]
    sample = page.locator("table", has=page.get_by_role("columnheader", name="length")).last
    cells = [row.locator("td").all_inner_texts() for row in sample.locator("tbody tr").all()]
    assert cells == [["1", "1"], ["2", "2"], ["3", "3"]]

    page.goto(f"{base}?view=checks&checkDetail=null_rate")
    page.get_by_text("Checks (4)").wait_for(timeout=60_000)
    _sees_passed(page, ["error_rate", "ids_complete", "null_rate"])
    page.get_by_text("Partitions", exact=True).last.click()
    page.get_by_text("Passed (1)").wait_for(timeout=60_000)
    page.get_by_title("monday", exact=True).last.click()
    page.get_by_text("There are no nulls in").wait_for(timeout=60_000)
    page.get_by_text("null_rate/length").wait_for(timeout=60_000)

    page.get_by_role("button", name="Execute all").click()
    check, done = ("texts/length", "null_rate"), ["SUCCEEDED", "SUCCEEDED"]
    texts.wait(
        lambda: [e["status"] for e in texts.evaluations(*check, "monday")] == done,
        "the checks are evaluated alone",
    )
    page.reload()
    _sees_passed(page, ["error_rate", "ids_complete", "null_rate"])


def _sees_passed(page: Any, checks: list[str]) -> None:
    """Waits until each check has the green mark in the list of an asset's checks."""
    for check in checks:
        mark = page.get_by_role("img", name="check_circle", exact=True)
        row = page.locator("div", has=page.get_by_title(check, exact=True)).filter(has=mark)
        row.filter(has_text="Succeeded").last.wait_for(timeout=60_000)
