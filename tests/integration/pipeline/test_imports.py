"""What importing the package and declaring a pipeline load and read."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any


def in_a_process(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_and_declaring_imports_nothing_heavy(tmp_path):
    """No Ray, no torch, and no Dagster either as long as no partitions are declared."""
    heavy = in_a_process("""
        import json, sys
        import vane_dagster as vd

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
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """)
    assert heavy == []


def test_definitions_do_no_io_on_source_and_store(tmp_path):
    """Building the assets opens nothing, not even folders, and imports nothing that a step does."""
    opened = in_a_process(f"""
        import json, sys, dagster as dg
        import vane_dagster as vd

        seen = []
        sys.addaudithook(lambda event, args: seen.append((event, str(args[0]) if args else "")))
        docs = vd.Pipeline("docs", source=vd.parquet("{tmp_path}/src/{{partition_key}}"), id="id",
                           partitions_def=dg.StaticPartitionsDefinition(["a"]))
        docs.project("clean", ["t"]).write("out", "{tmp_path}/out/{{partition_key}}")
        defs = dg.Definitions(
            assets=[docs.build_assets()],
            resources={{"compute": vd.RayCompute(cluster=vd.LocalCluster()),
                        "store": vd.FragmentStore(root="{tmp_path}/store")}},
        )
        dg.Definitions.validate_loadable(defs)
        touched = [e for e in seen if "{tmp_path}" in e[1] or e[0].startswith("socket.connect")]
        of_steps = ("ray", "torch", "sqlalchemy", "vane_dagster.engine.executor")
        print(json.dumps([touched, [name for name in of_steps if name in sys.modules]]))
    """)
    assert opened == [[], []]
    assert list(tmp_path.iterdir()) == []
