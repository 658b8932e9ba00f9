"""What all tests share: one local Ray head for the session, and pipelines run through Dagster."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import hypothesis
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd

# How long an example takes says nothing on a shared machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _home() -> Iterator[None]:
    """A state folder of the session's own, so that no other head is found or stopped."""
    folder = tempfile.mkdtemp(prefix="vt-", dir="/tmp")
    before = os.environ.get("VANE_DAGSTER_HOME")
    os.environ["VANE_DAGSTER_HOME"] = folder
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"
    yield
    if before is None:
        del os.environ["VANE_DAGSTER_HOME"]
    else:
        os.environ["VANE_DAGSTER_HOME"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(_home: None) -> Iterator[vd.LocalCluster]:
    """The session's Ray head: 2 CPUs, and 1 of a custom resource that only one worker can hold."""
    from vane_dagster.compute.local_head import LocalHead

    settings = {"name": "tests", "num_cpus": 2, "resources": {"accelerator": 1}}
    yield vd.LocalCluster(**settings)
    import ray

    ray.shutdown()
    LocalHead(**settings).stop()


@pytest.fixture(params=["local", "ray"])
def compute(request: pytest.FixtureRequest) -> Any:
    """Both computes in turn: the same test has to pass on subprocesses and on Ray."""
    if request.param == "local":
        return vd.LocalCompute(num_cpus=2, resources={"accelerator": 1})
    return vd.RayCompute(cluster=request.getfixturevalue("cluster"))


@pytest.fixture
def local() -> vd.LocalCompute:
    """Subprocesses alone, for what does not depend on where the work is done."""
    return vd.LocalCompute(num_cpus=2, resources={"accelerator": 1})


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server with the bucket "lake"."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    secrets = {"aws_access_key_id": "dummy", "aws_secret_access_key": "dummy"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **secrets)
    client.create_bucket(Bucket="lake")
    yield {
        "key": "dummy",
        "secret": "dummy",
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }
    server.stop()


Run = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def materialize(tmp_path: Path) -> Run:
    """Materializes a pipeline through Dagster: ``materialize(pipeline, compute, partition)``."""

    def run(
        pipeline: vd.Pipeline,
        compute: Any,
        partition: str | None = None,
        select: Sequence[str] | None = None,
        raises: bool = True,
        instance: dg.DagsterInstance | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> dg.ExecuteInProcessResult:
        assets = pipeline.build_assets()
        step = f"{pipeline.name}_pipeline"
        store = vd.FragmentStore(root=str(tmp_path / "store"))
        return dg.materialize(
            [assets],
            selection=None if select is None else [pipeline[name].key for name in select],
            partition_key=partition,
            resources={"compute": compute, "store": store},
            raise_on_error=raises,
            instance=instance,
            run_config={"ops": {step: {"config": dict(config)}}} if config else None,
        )

    return run


def write_source(
    folder: Path, table: pa.Table | Mapping[str, Any], name: str = "a.parquet", **kw: Any
) -> Path:
    """Writes a source file; ``row_group_size=`` and the like go to pyarrow."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), folder / name, **kw)
    return folder / name


def read_stage(store: Path, pipeline: str, stage: str, partition: str | None = None) -> pa.Table:
    """The rows of a stage through its manifest in force, in fragment order."""
    from vane_dagster.storage.filesystem import Location
    from vane_dagster.storage.store import Store

    opened = Store(Location(str(store)))
    name = opened.latest(pipeline, stage, [partition])[partition]
    manifest = opened.read(pipeline, stage, partition, name)
    folder = opened.parts(pipeline, stage, partition)
    files = [folder.file(part.name) for part in manifest.parts]
    if not files:
        return manifest.schema.empty_table()
    return ds.dataset(files, schema=manifest.schema).to_table()


def metadata(result: dg.ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    """Metadata of the materialization of a stage, as plain values."""
    found = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.materialization.asset_key.path[-1] == stage
    ]
    assert len(found) == 1, f"{len(found)} materializations of {stage}"
    return {name: value.value for name, value in found[0].metadata.items()}


def column_of(read: Any, column: str) -> list[Any]:
    """The values of a column, whatever form the rows were read in."""
    import duckdb
    import polars as pl

    if isinstance(read, ds.Dataset):
        read = read.to_table()
    elif isinstance(read, pl.LazyFrame):
        read = read.collect()
    elif isinstance(read, duckdb.DuckDBPyRelation):
        read = read.to_arrow_table()
    elif isinstance(read, pa.RecordBatchReader):
        read = read.read_all()
    return read[column].to_pylist() if isinstance(read, pa.Table) else list(read[column])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model with random weights."""
    from benchmarks.tiny_llm import make

    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def vllm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM wants in the environment on a CPU, without a network."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def failure(result: dg.ExecuteInProcessResult) -> str:
    """The description of the failed step's error."""
    assert not result.success
    data = next(event.step_failure_data for event in result.all_events if event.is_step_failure)
    description = data.user_failure_data.description if data.user_failure_data else None
    return description or str(data.error)
