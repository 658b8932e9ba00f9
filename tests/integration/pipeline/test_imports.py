"""What importing the package and declaring a pipeline load and read."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd


def in_a_process(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_and_declaring_imports_nothing_heavy(tmp_path):
    """No Ray, no torch, and no Dagster either as long as no partitions are declared.

    The decorators and the identity of code import no Arrow and no DuckDB.
    """
    heavy = in_a_process("""
        import json, sys
        from vane_dagster.fingerprint import bundle, code, objects
        import vane_dagster as vd
        vd.cls
        light = sorted({"numpy", "pyarrow", "duckdb"} & set(sys.modules))

        class Model:
            def __init__(self):
                import torch
            def __call__(self, batch):
                return batch

        docs = vd.Pipeline("docs", source=vd.parquet("/nowhere/at/all"), id="id")
        clean = docs.project("clean", {"t": "trim(t)"}, where="length(t) > 0")
        model = clean.map_batches("model", Model, schema={"x": "FLOAT[4]"}, gpus=1)
        docs.join("both", clean, model).write("out", "s3://bucket/out")
        heavy = ("ray", "torch", "dagster", "dagster_ray", "pandas", "s3fs", "botocore")
        print(json.dumps([light, [name for name in heavy if name in sys.modules]]))
    """)
    assert heavy == [[], []]


EXECUTES = [
    *("duckdb", "fsspec", "http.client", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet"),
    *("numpy.random", "opentelemetry", "ray", "sqlalchemy", "torch", "urllib.request"),
    *("vane_dagster.compute", "vane_dagster.engine", "vane_dagster.events", "vane_dagster.tracing"),
    *("vane_dagster.worker", "vane_dagster.planning.planner", "vane_dagster.storage.store"),
    *("vane_dagster.checks.drift", "vane_dagster.checks.golden"),
    *("vane_dagster.orchestration.read", "vane_dagster.orchestration.metadata"),
    *(
        "vane_dagster.providers.prompting",
        "vane_dagster.servers.process",
        "vane_dagster.types.spark",
    ),
    *("vane_dagster.sources.csv_files", "vane_dagster.sources.delta"),
    *("vane_dagster.storage.publish.base", "vane_dagster.types.to_arrow"),
    "vane_dagster.types.spark",
]
"""Modules that execute, or belong to other declarations. Each process of Dagster that loads
definitions would pay for them: code servers, runs and ticks of schedules."""


def test_definitions_import_what_they_declare_and_do_no_io(tmp_path):
    """Building the assets opens neither source nor store, not even their folders."""
    model = "class Model:\n    def __call__(self, batch):\n        return batch\n"
    code = tmp_path / "code"
    code.mkdir()
    (code / "user_model.py").write_text(model)
    imported, touched, of_steps = in_a_process(f"""
        import json, sys, dagster as dg
        before = set(sys.modules)
        import vane_dagster as vd
        sys.path.insert(0, "{code}")
        from user_model import Model

        seen = []
        sys.addaudithook(lambda event, args: seen.append((event, str(args[0]) if args else "")))
        docs = vd.Pipeline("docs", source=vd.parquet("{tmp_path}/src"), id="id")
        schema = {{"x": "FLOAT[4]", "label": "VARCHAR"}}
        docs.map_batches("model", Model, columns=["t"], schema=schema)
        store = vd.FragmentStore(root="{tmp_path}/store")
        resources = {{"compute": vd.LocalCompute(), "store": store}}
        dg.Definitions(assets=[docs.build_assets()], resources=resources)
        imported = sorted(set(sys.modules) - before)

        # Definitions with a target, partitions and a cluster
        keys = dg.StaticPartitionsDefinition(["a"])
        source = vd.parquet("{tmp_path}/src/{{partition_key}}")
        other = vd.Pipeline("other", source=source, id="id", partitions_def=keys)
        other.project("clean", ["t"]).write("out", "{tmp_path}/out/{{partition_key}}")
        resources["compute"] = vd.RayCompute(cluster=vd.LocalCluster())
        defs = dg.Definitions(assets=[other.build_assets()], resources=resources)
        dg.Definitions.validate_loadable(defs)
        places = [f"{tmp_path}/{{name}}" for name in ("src", "store", "out")]
        touched = [each for each in seen if any(place in each[1] for place in places)]
        touched += [each for each in seen if each[0].startswith("socket.connect")]
        of_steps = ("ray", "torch", "sqlalchemy", "vane_dagster.engine.executor")
        of_steps = [name for name in of_steps if name in sys.modules]
        print(json.dumps([imported, touched, of_steps]))
    """)
    assert [name for name in EXECUTES if name in imported] == []
    assert {"vane_dagster.sources.parquet", "vane_dagster.fingerprint.code"} <= set(imported)
    assert (touched, of_steps) == ([], [])
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_the_driver_of_a_step_imports_nothing_of_workers(tmp_path):
    """Each step pays for what its plan imports, and for what Ray imports with the pool manager."""
    (tmp_path / "src").mkdir()
    pq.write_table(pa.table({"id": [1], "t": ["one"]}), tmp_path / "src" / "a.parquet")
    keyed, imported = in_a_process(f"""
        import json, sys
        import vane_dagster as vd
        from vane_dagster.compute import pool_manager
        from vane_dagster.orchestration import steps
        from vane_dagster.planning.planner import plan_run
        from vane_dagster.storage.store import Store
        from vane_dagster.storage.filesystem import StoragePath

        class Model:
            def __call__(self, batch):
                return {{"n": [1] * len(batch)}}

        docs = vd.Pipeline("docs", source=vd.parquet("{tmp_path}/src"), id="id")
        docs.map_batches("model", Model, columns=["t"], schema={{"n": "BIGINT"}})
        plan = plan_run(docs, ["model"], [None], Store(StoragePath("{tmp_path}/store")))
        keyed = plan.partitions[0].stages["model"].row_definition
        heavy = ("duckdb", "pandas", "pyarrow.compute", "torch", "vane_dagster.worker.host")
        print(json.dumps([keyed, [name for name in heavy if name in sys.modules]]))
    """)
    assert keyed
    assert imported == []


def test_collections_of_a_step_leave_out_what_existed_before_it():
    with dg.build_resources({"compute": vd.LocalCompute()}):
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
