"""A run warns of heads that compete with its own; a driver waits for one that is being stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
from pathlib import Path

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import write_source
from support.heads import HEAD
from vane_dagster.compute import local_heads
from vane_dagster.compute.local_head import Head, LocalHead


def test_a_driver_waits_while_the_head_is_being_stopped(tmp_path: Path) -> None:
    """And then finds it gone, rather than connect to a head that ends under it."""
    local = LocalHead(home=tmp_path, name="stopping")
    local.folder.mkdir()
    found: list[Head | None] = [HEAD]
    driver = threading.Thread(target=lambda: found.append(local.connect(start=False)))
    record = dataclasses.asdict(dataclasses.replace(HEAD, pid=os.getpid()))
    (local.folder / "head.json").write_text(json.dumps(record))

    def nobody_else() -> bool:
        driver.start()
        driver.join(0.2)
        assert driver.is_alive()
        return True

    assert local.stop_if(nobody_else)
    driver.join(30)
    assert found == [HEAD, None]


def test_a_run_warns_of_a_head_that_competes(
    tmp_path: Path, cluster: vd.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.connect()
    head = cluster._head().find()
    monkeypatch.setattr(local_heads.os, "cpu_count", lambda: 2)
    gcs = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{gcs.getsockname()[1]}"
    other = dataclasses.replace(head, name="other", prefix="/env/other", address=address)
    folder = Path(os.environ["VANE_DAGSTER_HOME"]) / "other"
    folder.mkdir()
    (folder / "head.json").write_text(json.dumps(dataclasses.asdict(other)))
    try:
        path = write_source(tmp_path / "src", {"id": [1], "text": ["A"]})
        texts = vd.Pipeline("texts", source=vd.parquet(str(path)), id="id")
        texts.project("same", {"id": "id"})
        compute = vd.RayCompute(cluster=cluster, idle_timeout=7200)
        store = vd.FragmentStore(root=str(tmp_path / "store"))
        with dg.DagsterInstance.ephemeral() as instance:
            result = dg.materialize(
                [texts.build_assets()],
                resources={"compute": compute, "store": store},
                instance=instance,
            )
            logged = [r.user_message for r in instance.all_logs(result.run_id) if r.level == 30]
    finally:
        gcs.close()
        (folder / "head.json").unlink()
    (warning,) = [text for text in logged if "claims the same CPUs" in text]
    assert f"Ray head 'other' of /env/other at {address}" in warning
    (warning,) = [text for text in logged if "idle_timeout" in text]
    assert "idle_minutes=60" in warning
