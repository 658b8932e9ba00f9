"""Backfills, retries and pages in a real ``dagster dev``.

The tests do what a user does in Dagster's UI, by the GraphQL that it sends, and look at what
a user sees there and at what is in the store; some do it in a real browser, and see the demo there
too. They share one instance, as starting one takes longer than most tests, and keep to partitions
of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import vane_dagster as vd
from support import forked
from support.dagster_dev import IN_PROCESS, DagsterDev
from support.damage import stored_parts
from support.data import write_source
from support.paths import REPOSITORY

# Workers import this module, and need no Dagster for it.
FUNCTIONS = '''
import os
import time


def doubled(batch):
    """Fails at 666. The pipelines that use it share a worker."""
    values = batch["n"].to_pylist()
    if 666 in values:
        raise ValueError("a poisoned row")
    return {"double": [2 * n for n in values]}


class Noting:
    """Notes each batch by the source value of its first row; takes its time while it is told to."""

    def __init__(self, notes):
        self.notes = notes

    def __call__(self, batch):
        began = time.time()
        with open(os.path.join(self.notes, "calls"), "a") as calls:
            calls.write(f"{batch['n'][0]}\\n")
        if os.path.exists(os.path.join(self.notes, "slowly")):
            time.sleep(0.25)
        times = {"began": began, "ended": time.time(), "pid": os.getpid()}
        return {name: [value] * batch.num_rows for name, value in times.items()}
'''

DEFINITIONS = '''
"""Pipelines over what the tests write beside this file."""

from pathlib import Path

import dagster as dg
from functions import Noting, doubled

import vane_dagster as vd

ROOT = Path(__file__).parent
NOTES = str(ROOT / "notes")


def pipeline(name, partitions, **options):
    source = vd.parquet(f"{ROOT}/src/{name}/{{partition_key}}")
    return vd.Pipeline(
        name, source=source, id="id", partitions_def=partitions, fragment_rows=10, **options
    )


def doubling(stage):
    return stage.map_batches(
        "doubles", doubled, schema={"double": "BIGINT"}, columns=["n"], concurrency=1
    )


def noting(made):
    stage = made.map_batches(
        "noted", Noting, schema={"began": "DOUBLE", "ended": "DOUBLE", "pid": "BIGINT"},
        batch_size=5, concurrency=2, fn_constructor_kwargs={"notes": NOTES},
        reuse=vd.Reuse(version="1"),
    )
    stage.project("kept", ["pid"])
    return made


days = pipeline("days", dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-11"))
doubling(days).project("kept", ["double"])

slow = noting(pipeline("slow", dg.StaticPartitionsDefinition(["stopped"])))

shown = pipeline("shown", dg.StaticPartitionsDefinition(["monday"]))
doubling(shown.project("clean", {"n": "abs(n)"}))

defs = dg.Definitions(
    assets=[made.build_assets() for made in (days, slow, shown)]
    + [made.build_source() for made in (days, shown)],
    resources={
        "compute": vd.RayCompute(cluster=vd.LocalCluster(name="backfills", num_cpus=2)),
        "store": vd.FragmentStore(root=str(ROOT / "store")),
    },
)
'''
SLOW = ["slow/noted", "slow/kept"]


class Project(DagsterDev):
    def __init__(self, folder: Path, workspace: Path | None) -> None:
        super().__init__(folder, workspace)
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "definitions.py").write_text(DEFINITIONS)
        (folder / "notes").mkdir()
        self.store = vd.FragmentStore(root=str(folder / "store"))

    def write(self, pipeline: str, partition: str, values: list[int]) -> None:
        table = {"id": list(range(len(values))), "n": values}
        write_source(self.folder / "src" / pipeline / partition, table)

    def rows(self, stage: str, partition: str) -> dict[str, list[Any]]:
        return vd.load(stage, partition, store=self.store).to_pydict()

    def parts(self, stage: str, partition: str) -> int:
        """Count the finished parts of a stage in a partition, including those in no manifest."""
        pipeline, _, name = stage.partition("/")
        folder = self.folder / "store" / pipeline / name / "parts" / partition
        return len(stored_parts(folder))

    def calls(self, values: list[int]) -> Counter[int]:
        """Count the computations of some batches, by their first value."""
        noted = map(int, (self.folder / "notes" / "calls").read_text().split())
        return Counter(value for value in noted if value in set(values))

    def slowly(self, slow: bool) -> None:
        flag = self.folder / "notes" / "slowly"
        flag.touch() if slow else flag.unlink(missing_ok=True)

    def pools(self) -> list[dict[str, Any]]:
        shown = ["pools", "--json", "--name", "backfills"]
        program = f"from vane_dagster.cli.main import main; main({shown})"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        done = forked.run(["-c", program], clean, self.folder, 60)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def dev(_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project with its own Ray head, and the demo."""
    from vane_dagster.compute.local_head import LocalHead

    project = Project(tmp_path_factory.mktemp("project"), REPOSITORY / "workspace.yaml")
    try:
        project.start()
        yield project
    finally:
        project.stop()
        LocalHead(name="backfills").stop()


pytest.importorskip("dagster_webserver", reason="dagster-webserver is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DEMO_STAGES = ("clean", "embedding", "enriched", "published")

DAYS = ["days/doubles", "days/kept"]


def test_poisoned_partition_of_a_backfill_alone_fails_and_alone_is_retried(dev):
    good, bad = ["2026-01-04", "2026-01-06"], "2026-01-05"
    keys = [*good, bad]
    for rows, key in enumerate(good, start=4):
        dev.write("days", key, list(range(rows)))
    dev.write("days", bad, [1, 666, 3])

    backfill = dev.backfill(DAYS, keys, IN_PROCESS)
    state = dev.backfill_ended(backfill)

    assert state["status"] == "COMPLETED_FAILED"
    (run,) = state["runs"]
    assert run["status"] == "FAILURE"
    log = dev.said(run["runId"])
    assert f"1 of 3 partitions failed ('{bad}'). Finished parts are kept" in log
    assert "ValueError: a poisoned row" in log
    for stage in DAYS:
        assert state["assets"][stage] == {"targeted": 3, "materialized": 2, "failed": 1}
        for checks in dev.checks(stage).values():
            assert checks == dict.fromkeys(good, "SUCCEEDED")
        found = dev.asset(stage, keys)
        assert [found[key]["status"] for key in good] == ["MATERIALIZED"] * 2
        assert [found[key]["stale"] for key in good] == ["FRESH"] * 2
        assert len({found[key]["version"] for key in good}) == 2
        counts = [found[key]["metadata"]["dagster/partition_row_count"] for key in good]
        assert counts == [4, 5]
        assert (found[bad]["status"], found[bad]["events"]) == ("FAILED", 0)

    dev.write("days", bad, [1, 2, 3])
    state = dev.backfill_ended(dev.retry_failed(backfill))

    assert state["status"] == "COMPLETED_SUCCESS"
    assert state["partitionNames"] == [bad]
    assert [run["status"] for run in state["runs"]] == ["SUCCESS"]
    for stage in DAYS:
        for checks in dev.checks(stage).values():
            assert checks == dict.fromkeys(keys, "SUCCEEDED")
        for found in dev.asset(stage, keys).values():
            assert (found["status"], found["events"]) == ("MATERIALIZED", 1)
            assert found["stale"] == "FRESH"


def test_cancelled_run_stops_and_leaves_parts_and_warm_workers(dev):
    values = list(range(1000, 1400))
    dev.slowly(True)
    dev.write("slow", "stopped", values)
    run = dev.launch(SLOW, "stopped")
    dev.wait(lambda: dev.parts("slow/noted", "stopped") >= 4, "four parts are written")

    dev.terminate(run)

    assert dev.ended(run, seconds=30) == "CANCELED"
    called = dev.calls(values)
    assert len(called) < 80
    pools = dev.pools()
    assert not any(run in pool["leases"] for pool in pools)
    (pool,) = [pool for pool in pools if pool["label"] == "Noting"]
    warm = {worker["pid"] for worker in pool["workers"]}
    assert warm
    assert all(map(psutil.pid_exists, warm))
    time.sleep(1.5)  # what was at work or queued would have begun by now
    assert dev.calls(values) == called, "the workers went on"

    kept = dev.parts("slow/noted", "stopped")
    dev.slowly(False)
    dev.succeeded(dev.launch(SLOW, "stopped", IN_PROCESS))

    metadata = dev.asset("slow/noted", ["stopped"])["stopped"]["metadata"]
    assert metadata["fragments_reused"] == kept
    assert metadata["fragments_computed"] == 40 - kept
    assert metadata["model_loads"] == 0
    assert metadata["warm_hits"] > 0
    rows = dev.rows("slow/noted", "stopped")
    assert rows["id"] == list(range(400))
    assert set(rows["pid"]) <= warm
    assert dev.calls(values).total() <= 80 + 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser with a profile of its own. Starting one takes longer than reading a page."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
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


@pytest.fixture(scope="module")
def page(dev, browser) -> Iterator[Any]:
    opened = browser.new_page()
    opened.goto(f"{dev.url}/assets")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("group", "source"), [("stdlib_search", "stdlib_docs"), ("questions", "source")]
)
def test_asset_graph_of_the_demo_draws_the_source_and_every_stage(page, group, source):
    _follow(page, f"/locations/definitions/asset-groups/{group}/lineage")
    for name in (source, *DEMO_STAGES):
        page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    # The edges between them, as the graph draws them.
    assert page.locator("svg path").count() >= len(DEMO_STAGES)


def test_partition_is_materialized_by_clicking(dev, page):
    """From the button to the partition's numbers, its rows, where they are from, and checks."""
    dev.write("shown", "monday", [1, -2, 3])
    base = "/assets/shown/doubles"
    dev.succeeded(dev.launch(["shown/clean"], "monday", IN_PROCESS))
    _follow(page, base)
    page.get_by_role("button", name=re.compile("Materialize")).first.click(timeout=60_000)
    page.get_by_role("button", name="All", exact=True).click(timeout=60_000)
    page.get_by_role("button", name=re.compile("Launch")).last.click(timeout=60_000)
    dev.wait(
        lambda: dev.checks("shown/doubles")["quality"] == {"monday": "SUCCEEDED"},
        "the stage is materialized and its checks have passed",
    )

    _follow(page, f"{base}?view=partitions&partition=monday")
    page.get_by_text("rows_computed").first.wait_for(timeout=60_000)
    page.get_by_text("Materialized (1)").first.wait_for(timeout=60_000)
    page.get_by_text("Failed (0)").first.wait_for(timeout=60_000)
    # The table of the column schema, and that of the sample rows.
    page.get_by_text("from shown/clean: n", exact=True).first.wait_for(timeout=60_000)
    sample = page.locator("table", has=page.get_by_role("columnheader", name="double")).last
    cells = [row.locator("td").all_inner_texts() for row in sample.locator("tbody tr").all()]
    assert cells == [["0", "2"], ["1", "4"], ["2", "6"]]

    _follow(page, f"{base}?view=checks&checkDetail=quality")
    page.get_by_text("Checks (2)").wait_for(timeout=60_000)
    _sees_passed(page, ["rows", "quality"])
    page.get_by_text("Partitions", exact=True).last.click()
    page.get_by_text("Passed (1)").wait_for(timeout=60_000)
    page.get_by_title("monday", exact=True).last.click()
    page.get_by_text("0% nulls; the limit is 50%").first.wait_for(timeout=60_000)
    page.get_by_text("null_rate/double").wait_for(timeout=60_000)

    page.get_by_role("button", name="Execute all").click()
    check, done = ("shown/doubles", "quality"), ["SUCCEEDED", "SUCCEEDED"]
    dev.wait(
        lambda: dev.evaluations(*check, "monday") == done,
        "the checks are evaluated alone",
    )
    page.reload()
    _sees_passed(page, ["rows", "quality"])


def _follow(page: Any, path: str) -> None:
    """Go to another page as by a link, which loads no scripts again."""
    page.evaluate("path => history.pushState(null, '', path)", path)
    page.evaluate("() => dispatchEvent(new PopStateEvent('popstate'))")


def _sees_passed(page: Any, checks: list[str]) -> None:
    """Waits until each check has the green mark in the list of an asset's checks."""
    for check in checks:
        mark = page.get_by_role("img", name="check_circle", exact=True)
        row = page.locator("div", has=page.get_by_title(check, exact=True)).filter(has=mark)
        row.filter(has_text="Succeeded").last.wait_for(timeout=60_000)
