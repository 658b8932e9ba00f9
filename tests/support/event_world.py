"""A pipeline of four stages, and Dagster's events of its runs."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import sqlalchemy

import vane_dagster as vd
from support.data import write_source
from support.heads import free_port
from support.in_process import InProcessCompute
from support.results import over
from vane_dagster import checks
from vane_dagster.orchestration import run


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    """The URL of a database of a PostgreSQL server on this machine."""
    programs = [str(Path(each).parent) for each in glob.glob("/usr/lib/postgresql/*/bin/pg_ctl")]
    control = shutil.which("pg_ctl", path=os.pathsep.join([os.environ["PATH"], *programs]))
    if control is None:
        pytest.skip("PostgreSQL is not installed")
    user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
    port = free_port()
    folder = tempfile.mkdtemp(prefix="postgres-", dir="/tmp")  # which another user can enter
    if user:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        given = [control, "--pgdata", f"{folder}/data", "--silent", *command]
        subprocess.run(given, check=True, user=user, cwd=folder, stdin=subprocess.DEVNULL)

    run("init", "--options", "--auth=trust --username=postgres --no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run("start", "--log", f"{folder}/log", "--options", options)
    try:
        # named, since the default driver of SQLAlchemy is not that of dagster-postgres
        yield f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"
    finally:
        run("stop", "--mode", "immediate")
        shutil.rmtree(folder)


KEYS = [f"p{number:02}" for number in range(12)]
STAGES = ("vectors", "labels")


def embed(batch: pa.Table) -> pa.Table:
    texts = batch["text"].to_pylist()
    vectors = [[0.0 if text == "zero" else 1.0] for text in texts]
    return pa.table({"vector": pa.array(vectors, pa.list_(pa.float32(), 1)), "label": texts})


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Instances on both databases. The second one is emptied before the test."""
    if request.param == "postgres":
        url = request.getfixturevalue("database")
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("DROP SCHEMA public CASCADE"))
            connection.execute(sqlalchemy.text("CREATE SCHEMA public"))
        engine.dispose()
        config = {"storage": {"postgres": {"postgres_url": url}}}
        (tmp_path / "dagster.yaml").write_text(json.dumps(config))
    with dg.DagsterInstance.from_config(str(tmp_path)) as opened:
        yield opened


class World:
    def __init__(self, root: Path, compute: Any) -> None:
        self.root, self.compute = root, compute
        for key in KEYS:
            self.source(key, ["one", "two"])

    def source(self, key: str, texts: list[str]) -> None:
        table = {"id": pa.array(range(len(texts)), pa.int64()), "text": texts}
        write_source(self.root / "source" / key, table)

    def pipeline(self, fn: Any = embed, partitioned: bool = True, **given: Any) -> vd.Pipeline:
        docs = vd.Pipeline(
            "docs",
            source=vd.parquet(
                str(self.root / "source" / ("{partition_key}" if partitioned else "p00"))
            ),
            id="id",
            partitions_def=dg.StaticPartitionsDefinition(KEYS) if partitioned else None,
            **given,
        )
        schema = {"vector": "FLOAT[1]", "label": "VARCHAR"}
        vectors = docs.map_batches(
            "vectors", fn, schema=schema, asset=vd.Asset(checks=[checks.Vectors(blocking=True)])
        )
        vectors.project("labels", ["label"])
        return docs

    def run(
        self, instance: dg.DagsterInstance, *keys: str, assets: Any = None, **given: Any
    ) -> dg.ExecuteInProcessResult:
        return dg.materialize(
            assets or [self.pipeline().build_assets()],
            instance=instance,
            resources={
                "compute": self.compute,
                "store": vd.FragmentStore(root=str(self.root / "store")),
            },
            raise_on_error=False,
            **over(*keys),
            **given,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, InProcessCompute())


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all events of a run in one group, even on a slow machine."""
    monkeypatch.setattr(run, "_TICK_SECONDS", 600.0)


def materializations(
    instance: dg.DagsterInstance, stage: str
) -> dict[str | None, dg.AssetMaterialization]:
    key = dg.AssetKey(["docs", stage])
    records = instance.fetch_materializations(key, limit=1000, ascending=True).records
    found = [record.asset_materialization for record in records]
    assert len({each.partition for each in found}) == len(found), "one was logged twice"
    return {each.partition: each for each in found}
