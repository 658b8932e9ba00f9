"""`store promote` and `quarantine --patch`, killed at any moment and run again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support import forked
from vane_dagster import testing

ROWS = 20
BROKEN = 6
DEFINITIONS = """
import dagster as dg
import vane_dagster as vd

rows = [{{"id": n, "part": "ab"[n % 2]}} for n in range({ROWS})]
docs = vd.Pipeline(
    "docs", source=vd.table(rows, partition_column="part"), id="id", fragment_rows=5,
    partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
)

def label(id: int, text: str) -> str:
    with open("call" + "s", "a") as file:  # a literal that names a file is part of the code
        file.write(f"{{text}}{{id}} ")
    if id == {BROKEN}:
        raise ValueError("broken")
    return f"{{text}}{{id}}"

labelled = docs.map(
    "labelled", label, fn_kwargs={{"text": {text!r}}}, on_error="quarantine"
)
labelled.project("last", ["id", "labelled"]).write("published", "{folder}/out/{{partition_key}}")
compute, store = vd.LocalCompute(num_cpus=1), vd.FragmentStore(**{store!r})
defs = dg.Definitions(
    assets=[docs.build_assets()], resources={{"compute": compute, "store": store}}
)
"""


def write(folder: Path, text: str, **store: str) -> None:
    """Write definitions to a module with the name of their labels."""
    given = {"folder": folder, "store": store, "ROWS": ROWS, "BROKEN": BROKEN}
    (folder / f"{text}.py").write_text(DEFINITIONS.format(text=text, **given))


def run(folder: Path, text: str) -> float:
    code = f"import sys; sys.path.insert(0, ''); import {text} as made; "
    code += "made.docs.run(store=made.store, compute=made.compute)"
    began = time.monotonic()
    forked.run(["-c", code], environment(folder), folder, 280).check_returncode()
    return time.monotonic() - began


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "DAGSTER_HOME": str(folder / "home")}


def killed(folder: Path, words: list[str], kill: float) -> int:
    """Kill a command at a write to the storage or, with a fraction, after some seconds."""
    faults = [testing.StorageFault("*", "kill", calls=kill)] if isinstance(kill, int) else []
    code = f"from vane_dagster.cli.main import main; main({words!r})"
    with testing.faults(*faults):
        command = forked.Program(["-c", code], environment(folder), folder)
        try:
            return command.wait(280 if faults else kill)
        except subprocess.TimeoutExpired:
            command.kill()
            return command.wait()


def in_force(folder: Path, stage: str, partition: str) -> Mapping[int, str]:
    rows = vd.load(f"docs/{stage}", [partition], store=str(folder / "store"))
    return once(rows)


def once(rows: pa.Table) -> Mapping[int, str]:
    found = dict(zip(rows["id"].to_pylist(), rows["labelled"].to_pylist()))
    assert len(found) == len(rows)
    return found


def labels(text: str, partition: str) -> dict[int, str]:
    return {n: f"{text}{n}" for n in range("ab".index(partition), ROWS, 2) if n != BROKEN}


@pytest.mark.parametrize("command", ["promote", "patch"])
def test_a_command_that_is_killed_is_run_again(tmp_path: Path, command: str) -> None:
    """Each partition is as before or as after, nothing is computed, and no row is lost."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/dagster.yaml").touch()
    store = str(tmp_path / "store")
    write(tmp_path, "old", root=store)
    seconds = run(tmp_path, "old")
    before = {key: labels("old", key) for key in "ab"}
    if command == "promote":
        write(tmp_path, "new", root=str(tmp_path / "branch"), fallback=store)
        run(tmp_path, "new")
        words = ["store", "promote", str(tmp_path / "branch"), store, "docs", "-f", "new.py"]
        after = {key: labels("new", key) for key in "ab"}
    else:
        pq.write_table(pa.table({"id": [BROKEN], "labelled": ["by hand"]}), tmp_path / "fix")
        words = ["quarantine", "docs/labelled", "--patch=fix", "--partitions=a", "-fold.py"]
        after = {**before, "a": {**before["a"], BROKEN: "by hand"}}
    calls = (tmp_path / "calls").read_text()
    kills = [random.randint(1, 3), random.randint(4, 9), random.uniform(0.3, 1) * seconds]
    codes = []
    for kill in kills:
        codes.append(killed(tmp_path, words, kill))
        assert codes[-1] in (0, -signal.SIGKILL), kills
        for stage, key in ((stage, key) for stage in ("labelled", "last") for key in "ab"):
            assert in_force(tmp_path, stage, key) in (before[key], after[key]), (kills, codes)
    assert codes[0] == -signal.SIGKILL
    assert killed(tmp_path, words, 280.0) == 0
    if command == "promote":
        write(tmp_path, "new", root=store)
    run(tmp_path, "new" if command == "promote" else "old")
    for key in "ab":
        assert in_force(tmp_path, "labelled", key) == in_force(tmp_path, "last", key) == after[key]
        assert once(pq.read_table(tmp_path / "out" / key, partitioning=None)) == after[key]
    assert (tmp_path / "calls").read_text() == calls, kills
    if command == "promote":
        with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
            for stage in ("labelled", "last", "published"):
                key = dg.AssetKey(["docs", stage])
                assert instance.get_materialized_partitions(key) == {"a", "b"}
