"""A real ``dagster dev`` (webserver, daemon, code server), used through GraphQL as its UI does.

What is not shown as such is read from its instance.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

from support.heads import free_port
from support.results import entries

REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "definitions.py"}
ENDED = ("SUCCESS", "FAILURE", "CANCELED")

# The instance of a user without a dagster.yaml, except that the queue is polled more often.
INSTANCE = """
telemetry:
  enabled: false
nux:
  enabled: false
run_queue:
  dequeue_interval_seconds: 1
"""

WORKSPACE = """
load_from:
  - python_file:
      relative_path: definitions.py
"""

# The daemon looks for backfills every 30 s, which is not configurable.
SITE = """
import sys

if "dagster._daemon" in sys.orig_argv:
    from dagster._daemon import controller

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
"""

# Run configuration: all steps in the process of the run, instead of one more process each.
IN_PROCESS = {"execution": {"config": {"in_process": {}}}}


class DagsterDev:
    """``dagster dev`` over ``definitions.py`` in a folder, with its own instance there."""

    def __init__(self, folder: Path, workspace: Path | None = None) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.log = folder / "dagster-dev.log"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text(INSTANCE)
        self.instance = dg.DagsterInstance.from_config(str(self.home))
        (folder / "workspace.yaml").write_text(WORKSPACE)
        self._workspaces = [folder / "workspace.yaml", *filter(None, [workspace])]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    def start(self) -> None:
        """Start it and wait until it answers and its daemons are running."""
        # A process that has connected to a local head has its settings in its environment.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment = {
            **clean,
            "DAGSTER_HOME": str(self.home),
            "VANE_DEMO_DATA": str(self.home / "data"),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(self.folder / "site"), os.environ.get("PYTHONPATH")])
            ),
        }
        command = ["dagster", "dev"]
        for workspace in self._workspaces:
            command += ["-w", str(workspace)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # A page asks every two seconds by default. What tests look at, they load.
        command += ["--live-data-poll-rate", "10000"]
        folder = self._workspaces[-1].parent
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait(self._is_up, "dagster dev is up", 120)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"dagster dev ended: {self._said()}"
        try:
            found = self.ask(
                "{ instance { daemonHealth { allDaemonStatuses { required healthy } } } "
                "  repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
            )
        except (urllib.error.URLError, OSError):
            return False
        daemons = found["instance"]["daemonHealth"]["allDaemonStatuses"]
        loaded = found["repositoriesOrError"].get("nodes", ())
        is_loaded = len(loaded) == len(self._workspaces)
        return is_loaded and all(d["healthy"] for d in daemons if d["required"])

    def stop(self) -> None:
        """Stop it with all processes that it has started, including runs."""
        if self._process is not None:
            self.processes()
            os.kill(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self.instance.dispose()
        _, left = psutil.wait_procs(self._seen, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        found = psutil.Process(self._process.pid).children(recursive=True)
        self._seen.update(found)
        return found

    def _said(self) -> str:
        return self.log.read_text()[-4000:]

    # GraphQL

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"{self.url}/graphql", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}") from error
        assert "errors" not in found, found["errors"]
        return dict(found["data"])

    def do(self, mutation: str, expected: str, **variables: Any) -> dict[str, Any]:
        (found,) = self.ask(mutation, **variables).values()
        assert found["__typename"] == expected, found
        return dict(found)

    def wait(self, true: Callable[[], Any], what: str, seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, f"in {seconds} s not: {what}\n{self._said()}"
            time.sleep(0.5)  # each look is a query, which takes CPU time from what it waits for

    # Runs

    def launch(
        self, stages: Sequence[str], partition: str, config: Mapping[str, Any] | None = None
    ) -> str:
        """Launch a run of some assets in a partition, as the dialog of one partition does."""
        job = {"pipelineName": "__ASSET_JOB", "assetSelection": asset_keys(stages)}
        tags = [{"key": "dagster/partition", "value": partition}]
        launched = self.do(
            """mutation($params: ExecutionParams!) {
                 launchPipelineExecution(executionParams: $params) { __typename
                   ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }""",
            "LaunchRunSuccess",
            params={
                "selector": {**REPOSITORY, **job},
                "mode": "default",
                "runConfigData": config or {},
                "executionMetadata": {"tags": tags},
            },
        )
        return str(launched["run"]["runId"])

    def terminate(self, run: str) -> None:
        answer = self.do(
            """mutation($ids: [String!]!) {
                 terminateRuns(runIds: $ids, terminatePolicy: SAFE_TERMINATE) { __typename
                   ... on TerminateRunsResult { terminateRunResults { __typename } } } }""",
            "TerminateRunsResult",
            ids=[run],
        )
        (result,) = answer["terminateRunResults"]
        assert result["__typename"] == "TerminateRunSuccess", result

    def status(self, run: str) -> str:
        record = self.instance.get_run_by_id(run)
        assert record is not None
        return record.status.value

    def ended(self, run: str, seconds: float = 90) -> str:
        self.wait(lambda: self.status(run) in ENDED, f"run {run} has ended", seconds)
        return self.status(run)

    def succeeded(self, run: str) -> None:
        assert self.ended(run) == "SUCCESS", self.said(run)

    def said(self, run: str) -> str:
        lines = []
        for entry in self.instance.all_logs(run):
            failed = entry.dagster_event and entry.dagster_event.is_step_failure
            error = entry.get_dagster_event().step_failure_data.error if failed else ""
            lines.append(f"{entry.message} {error}".rstrip())
        return "\n".join(lines)

    # Backfills

    def backfill(
        self,
        stages: Sequence[str],
        partitions: Sequence[str],
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """Launch a backfill of assets, as the dialog of several partitions does."""
        launched = self.do(
            """mutation($params: LaunchBackfillParams!) {
                 launchPartitionBackfill(backfillParams: $params) { __typename
                   ... on LaunchBackfillSuccess { backfillId }
                   ... on PythonError { message } } }""",
            "LaunchBackfillSuccess",
            params={
                "assetSelection": asset_keys(stages),
                "partitionNames": list(partitions),
                "runConfigData": config or {},
            },
        )
        return str(launched["backfillId"])

    def retry_failed(self, backfill: str) -> str:
        """Launch the failed and missing partitions of a backfill again, as the UI's menu does."""
        launched = self.do(
            """mutation($params: ReexecutionParams!) {
                 reexecutePartitionBackfill(reexecutionParams: $params) { __typename
                   ... on LaunchBackfillSuccess { backfillId }
                   ... on PythonError { message } } }""",
            "LaunchBackfillSuccess",
            params={"parentRunId": backfill, "strategy": "FROM_FAILURE"},
        )
        return str(launched["backfillId"])

    def backfill_state(self, backfill: str) -> dict[str, Any]:
        """Return a backfill as its page shows it: status, partitions, runs, and counts by asset."""
        state = self.ask(
            """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
                 ... on PartitionBackfill {
                   status partitionNames
                   runs { runId status }
                   assetBackfillData { assetBackfillStatuses {
                     ... on AssetPartitionsStatusCounts { assetKey { path }
                       targeted: numPartitionsTargeted materialized: numPartitionsMaterialized
                       failed: numPartitionsFailed } } }
                 } } }""",
            id=backfill,
        )["partitionBackfillOrError"]
        counts = (state.pop("assetBackfillData") or {}).get("assetBackfillStatuses", ())
        state["assets"] = {"/".join(count.pop("assetKey")["path"]): count for count in counts}
        return dict(state)

    def backfill_ended(self, backfill: str) -> dict[str, Any]:
        def over() -> bool:
            found = self.ask(
                """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
                     ... on PartitionBackfill { status } } }""",
                id=backfill,
            )
            status = found["partitionBackfillOrError"]["status"]
            return status in ("COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED")

        self.wait(over, f"backfill {backfill} has ended", seconds=150)
        return self.backfill_state(backfill)

    # Assets

    def asset(self, stage: str, partitions: Sequence[str]) -> dict[str, dict[str, Any]]:
        (node,) = self.ask(
            """query($keys: [AssetKeyInput!]!, $partitions: [String!]!) {
                 assetNodes(assetKeys: $keys) {
                   staleStatusByPartition(partitions: $partitions)
                   dataVersionByPartition(partitions: $partitions)
                   assetMaterializations(partitions: $partitions) {
                     partition metadataEntries { label
                       ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue }
                       ... on MarkdownMetadataEntry { mdStr } } }
                   partitionKeys
                   assetPartitionStatuses {
                     ... on TimePartitionStatuses { ranges { startKey endKey status } }
                     ... on DefaultPartitionStatuses {
                       materializedPartitions failedPartitions materializingPartitions } }
                 } }""",
            keys=asset_keys([stage]),
            partitions=list(partitions),
        )["assetNodes"]
        statuses = _statuses(node)
        found = {}
        for index, partition in enumerate(partitions):
            events = [e for e in node["assetMaterializations"] if e["partition"] == partition]
            found[partition] = {
                "status": statuses.get(partition, "MISSING"),
                "stale": node["staleStatusByPartition"][index],
                "version": node["dataVersionByPartition"][index],
                "events": len(events),
                "metadata": _metadata(events[0]) if events else {},
            }
        return found

    # Checks

    def checks(self, stage: str) -> dict[str, dict[str, str]]:
        """Return the status of each check of an asset, by partition, as its page counts them."""
        (node,) = self.ask(
            """query($keys: [AssetKeyInput!]!) {
                 assetNodes(assetKeys: $keys) { partitionKeys
                   assetChecksOrError { ... on AssetChecks { checks { name partitionStatuses {
                     ... on AssetCheckTimePartitionStatuses { ranges { startKey endKey status } }
                     ... on AssetCheckDefaultPartitionStatuses {
                       succeededPartitions failedPartitions inProgressPartitions
                       skippedPartitions executionFailedPartitions } } } } } } }""",
            keys=asset_keys([stage]),
        )["assetNodes"]
        kinds = ("succeeded", "failed", "inProgress", "skipped", "executionFailed")
        return {
            check["name"]: _statuses({**node, **check}, "partitionStatuses", kinds)
            for check in node["assetChecksOrError"]["checks"]
        }

    def evaluations(self, stage: str, check: str, partition: str) -> list[str]:
        key = dg.AssetCheckKey(dg.AssetKey(stage.split("/")), check)
        records = self.instance.event_log_storage.get_asset_check_execution_history(key, 100)
        return [record.status.value for record in records if record.partition == partition]


def asset_keys(stages: Sequence[str]) -> list[Mapping[str, list[str]]]:
    return [{"path": stage.split("/")} for stage in stages]


def _statuses(
    node: Mapping[str, Any],
    field: str = "assetPartitionStatuses",
    kinds: Sequence[str] = ("materialized", "failed", "materializing"),
) -> dict[str, str]:
    found, statuses = {}, node[field]
    for kind in kinds:
        found |= dict.fromkeys(statuses.get(f"{kind}Partitions") or [], kind.upper())
    keys = node["partitionKeys"]
    for span in statuses.get("ranges") or []:
        first, last = keys.index(span["startKey"]), keys.index(span["endKey"])
        found |= dict.fromkeys(keys[first : last + 1], span["status"])
    return found


def _metadata(event: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("intValue", "text", "mdStr")
    every = event["metadataEntries"]
    return entries({e["label"]: next((e[k] for k in kinds if k in e), None) for e in every})
