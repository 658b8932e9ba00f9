"""Secrets planted in options, URLs, variables and arguments are in nothing that a run wrote."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

import vane_dagster as vd
from support.data import write_source
from support.planted import (
    Client,
    denying,  # noqa: F401  # fixtures
    planted,
)
from support.results import failure
from support.warm_workers import workers_that_imported


class Planted:
    """Secrets in each place that takes some, and a lake on S3."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        names = (
            "key",
            "secret",
            "lake_key",
            "lake_secret",
            "variable",
            "named",
            "argument",
            "call",
        )
        self.values = {name: planted() for name in names}
        self.wrapped = planted()
        self.endpoint = endpoint
        self.folder = folder
        self.bucket = f"b{uuid.uuid4().hex}"
        self.instance = dg.DagsterInstance.local_temp(str(folder))
        login = {"aws_access_key_id": "dummy", "aws_secret_access_key": "dummy"}
        self.client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **login)
        self.client.create_bucket(Bucket=self.bucket)
        file = write_source(folder.parent / "src", {"id": range(8)})
        self.client.upload_file(str(file), self.bucket, "in/a.parquet")

    def place(self, path: str) -> str:
        return f"s3://{self.bucket}/{path}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Options with a login that no variable has."""
        login = {"key": self.values["lake_key"], "secret": self.values["lake_secret"]}
        region = {"client_kwargs": {"region_name": "us-east-1"}}
        return {"endpoint_url": self.endpoint, **login, **region, **more}

    def run(
        self,
        compute: Any,
        source: str = "in",
        fails: str = "",
        on_error: str = "raise",
        **more: Any,
    ) -> dg.ExecuteInProcessResult:
        given = self.options(**more)
        pipeline = vd.Pipeline(
            "p", source=vd.parquet(self.place(source), storage_options=given), id="id"
        )
        stage = pipeline.map_batches(
            "m",
            Client,
            schema={"y": pa.int64()},
            fn_constructor_kwargs={
                "api_key": self.values["argument"],
                "wrapped": SecretStr(self.wrapped),
                "fails": fails,
            },
            fn_kwargs={"password": self.values["call"]},
            batch_size=4,
            concurrency=vd.Workers(1, env_vars=["DEPLOYMENT"]),
            on_error=vd.Failures(on_error, max_error_rate=0.9),
        )
        stage.write("out", self.place("out"), storage_options=given)
        secrets = {"key": self.values["key"], "secret": dg.EnvVar("DEPLOY_SECRET_KEY")}
        root = self.place(f"store/{type(compute).__name__}")
        store = vd.FragmentStore(root=root, storage_options=self.options(**secrets))
        return dg.materialize(
            [pipeline.build_assets()],
            resources={"compute": compute, "store": store},
            instance=self.instance,
            raise_on_error=False,
        )

    def written(self, printed: str, *folders: Path) -> dict[str, str]:
        found = {"printed": printed}
        for run in self.instance.get_runs():
            logs = self.instance.all_logs(run.run_id)
            assert logs
            found[f"events of {run.run_id}"] = "\n".join(map(dg.serialize_value, logs))
            found[f"run {run.run_id}"] = dg.serialize_value(run)
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            for listed in page.get("Contents", ()):
                key = listed["Key"]
                body = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
                found[key] = f"{key} {body!r}"
                if key.endswith(".parquet"):
                    table = pq.read_table(pa.BufferReader(body))
                    found[key] += f"{table.to_pylist()} {table.schema.metadata}"
        for folder in (self.folder, *folders):
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert files, folder
            for path in files:
                found[str(path)] = f"{path} {path.read_bytes()!r}"
        return found

    def check(self, written: Mapping[str, str]) -> None:
        secrets = {**self.values, "wrapped": self.wrapped}
        found = [(n, where) for n, v in secrets.items() for where, t in written.items() if v in t]
        assert found == []


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """The client of S3 takes a second to import, and most runs have workers that do."""
    with workers_that_imported("s3fs", "botocore.session"):
        yield


@pytest.fixture
def secrets(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    (tmp_path / "dagster").mkdir()
    made = Planted(s3_endpoint, tmp_path / "dagster")
    monkeypatch.setenv("DEPLOYMENT", made.values["variable"])
    monkeypatch.setenv("DEPLOY_API_KEY", made.values["named"])
    monkeypatch.setenv("DEPLOY_SECRET_KEY", made.values["secret"])
    yield made
    made.instance.dispose()


def test_runs_tell_no_secret(secrets, local, cluster, denying, capfd):
    import ray

    # In subprocesses: rows that fail, a source that is not there, and one that refuses the login.
    assert secrets.run(local, fails="call", on_error="quarantine").success
    message = failure(secrets.run(local, source="missing"))
    assert f"'s3://{secrets.bucket}/missing'" in message
    at = f"http://127.0.0.1:{denying.server_port}"
    assert "AWS4-HMAC-SHA256 Credential=***/" in failure(secrets.run(local, endpoint_url=at))

    # An ordinary asset: what the IO manager raises, with what that was caused by.
    options = {**secrets.options(), "endpoint_url": at}
    denied = vd.FragmentStore(root=secrets.place("store"), storage_options=options)

    @dg.asset
    def made() -> pa.Table:
        return pa.table({"id": [1]})

    given = {"resources": {"io_manager": denied}, "instance": secrets.instance}
    result = dg.materialize([made], **given, raise_on_error=False)
    events = list(map(dg.serialize_value, secrets.instance.all_logs(result.run_id)))
    assert any("Credential=***/" in text for text in events)

    # On Ray: rows and models that fail.
    compute = vd.RayCompute(cluster=cluster)
    message = failure(secrets.run(compute, fails="call"))
    assert "ValueError: cannot call with *** *** ***, ***, {'DEPLOY" in message
    assert secrets.run(compute, fails="call", on_error="quarantine").success
    assert "refused: *** *** ***" in failure(secrets.run(compute, fails="constructor"))

    # All that was written: Dagster's files and events, the store, logs of Ray, and its actors.
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    home = Path(os.environ["VANE_DAGSTER_HOME"])
    out, err = capfd.readouterr()
    written = secrets.written(out + err, session / "logs", home)
    assert any("cannot call with ***" in text for key, text in written.items() if "store/" in key)
    assert any("/manifests/" in key for key in written)
    never = {"resources": {"none": 1}, "runtime_env": {"env_vars": {"SEEN_BY_OTHERS": "1"}}}
    waiting = ray.remote(type("Waiting", (), {})).options(name="waiting", **never).remote()
    state = ray._private.state.state
    actors = state._connect_and_get_accessor().get_actor_table(None, None)
    assert any(b"SEEN_BY_OTHERS" in actor for actor in actors)  # so that variables would be seen
    ray.kill(waiting)
    written["actors"] = repr(actors)
    secrets.check(written)
