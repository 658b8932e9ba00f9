"""Secrets planted in options, URLs, variables and arguments are in nothing that a run wrote."""

from __future__ import annotations

import base64
import os
import pickle
import threading
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import boto3
import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from pydantic import BaseModel, SecretStr

import vane_dagster as vd
from support.results import failure
from vane_dagster._secrets import errors_masked, keep_options, masked, url_parts
from vane_dagster.fingerprint.digest import value_digest
from vane_dagster.storage.filesystem import Location


def planted() -> str:
    return f"planted{uuid.uuid4().hex}"


class Client:
    """A model with a login, which it tells when it fails."""

    def __init__(self, api_key: str, wrapped: SecretStr, fails: str = "") -> None:
        assert isinstance(wrapped, SecretStr)
        self.login = f"{api_key} {wrapped.get_secret_value()} {os.environ['DEPLOYMENT']}"
        self.fails = fails
        if fails == "constructor":
            raise RuntimeError(f"refused: {self.login}")

    def __call__(self, batch: pa.Table, password: str) -> pa.Table:
        if self.fails == "call" and 3 in batch["id"].to_pylist():
            told = {name: value for name, value in os.environ.items() if "DEPLOY" in name}
            raise ValueError(f"cannot call with {self.login}, {password}, {told}")
        return pa.table({"y": [len(self.login)] * len(batch)})


class Planted:
    """Secrets in each place that takes some, and a lake on S3."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        names = ("key", "secret", "url_key", "url_secret", "variable", "named", "argument", "call")
        self.values = {name: planted() for name in names}
        self.wrapped = planted()
        self.endpoint = endpoint
        self.folder = folder
        self.bucket = f"b{uuid.uuid4().hex}"
        self.instance = dg.DagsterInstance.local_temp(str(folder))
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1",
            aws_access_key_id="dummy", aws_secret_access_key="dummy",
        )  # fmt: skip
        self.client.create_bucket(Bucket=self.bucket)
        table, sink = pa.table({"id": range(8)}), pa.BufferOutputStream()
        pq.write_table(table, sink)
        self.client.put_object(
            Bucket=self.bucket, Key="in/a.parquet", Body=sink.getvalue().to_pybytes()
        )

    def place(self, path: str) -> str:
        """A URL in the bucket, with a user and password."""
        login = f"{self.values['url_key']}:{self.values['url_secret']}"
        return f"s3://{login}@{self.bucket}/{path}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Options without a login, which the URL has."""
        return {
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
            **more,
        }

    def run(
        self, compute: Any, source: str = "in", root: str | None = None,
        endpoint: str | None = None, fails: str = "", on_error: str = "raise",
    ) -> dg.ExecuteInProcessResult:  # fmt: skip
        given = self.options(**({"endpoint_url": endpoint} if endpoint else {}))
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
            env_vars=["DEPLOYMENT"],
            batch_size=4,
            on_error=on_error,
            max_error_rate=0.9,
        )
        stage.write("out", self.place("out"), storage_options=given)
        secrets = {"key": self.values["key"], "secret": dg.EnvVar("DEPLOY_SECRET_KEY")}
        store = vd.FragmentStore(
            root=root or f"s3://{self.bucket}/store", storage_options=self.options(**secrets)
        )
        return dg.materialize(
            [pipeline.build_assets()],
            resources={"compute": compute, "store": store},
            instance=self.instance,
            raise_on_error=False,
        )

    def written(self, printed: str, *folders: Path) -> dict[str, str]:
        """All that runs have written, by where it is."""
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
        """Finds none of the secrets."""
        secrets = {**self.values, "wrapped": self.wrapped}
        found = [(n, where) for n, v in secrets.items() for where, t in written.items() if v in t]
        assert found == []


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def secrets(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    (tmp_path / "dagster").mkdir()
    made = Planted(endpoint, tmp_path / "dagster")
    monkeypatch.setenv("DEPLOYMENT", made.values["variable"])
    monkeypatch.setenv("DEPLOY_API_KEY", made.values["named"])
    monkeypatch.setenv("DEPLOY_SECRET_KEY", made.values["secret"])
    yield made
    made.instance.dispose()


class Answers(BaseHTTPRequestHandler):
    """Denies everything, and repeats who asked, as S3 and proxies do."""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization", "")
        name, _, password = base64.b64decode(login[6:]).decode().partition(":") if (
            login.startswith("Basic ")
        ) else (login, "", "")  # fmt: skip
        if (name, password) == ("reader", self.server.password):
            self._answer(200, b"rows")
        else:
            told = escape(f"{login} may not read {self.path}")
            body = f"<Error><Code>AccessDenied</Code><Message>{told}</Message></Error>"
            self._answer(403, body.encode())

    do_PUT = do_POST = do_GET

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def denying() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.password = ""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_runs_tell_no_secret(secrets, local, denying, capfd):
    assert secrets.run(local).success
    told = failure(secrets.run(local, fails="call"))
    assert "ValueError: cannot call with *** *** ***, ***, {'DEPLOY" in told
    assert secrets.run(local, fails="call", on_error="quarantine").success
    assert secrets.run(local, fails="call", on_error="null").success
    assert "refused: *** *** ***" in failure(secrets.run(local, fails="constructor"))
    told = failure(secrets.run(local, source="missing"))
    assert f"'s3://{secrets.bucket}/missing'" in told
    at = f"http://127.0.0.1:{denying.server_port}"
    assert "AWS4-HMAC-SHA256 Credential=***/" in failure(secrets.run(local, endpoint=at))
    assert "cannot be" in failure(secrets.run(local, root="s3://no-such-bucket/x"))

    out, err = capfd.readouterr()
    written = secrets.written(out + err)
    assert any("cannot call with ***" in text for key, text in written.items() if "store/" in key)
    assert any("/manifests/" in key for key in written)
    secrets.check(written)


def test_runs_on_ray_tell_no_secret(secrets, cluster, capfd):
    import ray

    compute = vd.RayCompute(cluster=cluster)
    assert secrets.run(compute).success
    assert "cannot call with *** ***" in failure(secrets.run(compute, fails="call"))
    assert "refused: *** *** ***" in failure(secrets.run(compute, fails="constructor"))
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    home = Path(os.environ["VANE_DAGSTER_HOME"])
    out, err = capfd.readouterr()
    written = secrets.written(out + err, session / "logs", home)
    state = ray._private.state.state
    actors = state._connect_and_get_accessor().get_actor_table(None, None)
    assert any(b"OMP_NUM_THREADS" in actor for actor in actors)  # so that variables would be seen
    written["actors"] = repr(actors)
    secrets.check(written)


def test_an_ordinary_asset_tells_no_secret(secrets, denying, capfd):
    """What the IO manager raises, with what that was caused by."""
    at = f"http://127.0.0.1:{denying.server_port}"
    options = {**secrets.options(), "endpoint_url": at}
    root = secrets.place("store")
    store = vd.FragmentStore(root=root, storage_options=options)

    @dg.asset
    def made() -> pa.Table:
        return pa.table({"id": [1]})

    result = dg.materialize(
        [made], resources={"io_manager": store}, instance=secrets.instance, raise_on_error=False
    )
    events = list(map(dg.serialize_value, secrets.instance.all_logs(result.run_id)))
    assert any("Credential=***/" in text for text in events)
    out, err = capfd.readouterr()
    secrets.check(secrets.written(out + err))


def test_a_password_in_a_url_is_a_storage_option(denying):
    secret = f"{planted()}/+"
    denying.password = secret
    quoted = secret.replace("/", "%2F").replace("+", "%2B")
    place = f"127.0.0.1:{denying.server_port}/a"
    folder = Location(f"http://reader:{quoted}@{place}")
    assert folder.url == f"http://{place}"
    assert folder.read("b") == b"rows"
    assert pickle.loads(pickle.dumps(folder)).child("c").read("d") == b"rows"
    with pytest.raises(vd.StoreError) as raised:
        Location(f"http://reader:no{quoted}@{place}").read("b")
    told = f"{raised.value} {raised.value.__cause__} {folder}"
    assert secret not in told
    assert quoted not in told

    options = {"endpoint_url": "http://x"}
    source = vd.parquet(f"s3://id:{quoted}@lake/x", storage_options=options)
    assert source.url == "s3://lake/x"
    assert source.storage_options == {"key": "id", "secret": secret, **options}
    assert vd.parquet("s3://id:a/b+c@lake/x").storage_options["secret"] == "a/b+c"
    assert vd.parquet("sftp://me:word@host/x").storage_options["password"] == "word"
    for plain in ("abfs://container@account.dfs.core.windows.net/x", "s3://lake/a:b", "/a:b@c"):
        assert url_parts(plain) == (plain, {})
    golden = vd.checks.Golden(f"http://reader:{quoted}@{place}/a.parquet")
    assert secret not in repr(golden)
    assert quoted not in repr(golden)
    assert golden.expected == f"http://{place}/a.parquet"
    with pytest.raises(pa.ArrowInvalid):  # it was let in, and what it read are no rows
        golden.opened()
    with pytest.raises(vd.DefinitionError, match="storage_options") as refused:
        vd.parquet("hdfs://me:hidden@host/x")
    assert "hidden" not in str(refused.value)


def test_the_password_of_a_url_is_no_part_of_a_definition():
    from vane_dagster.planning.definition import stage_definition

    found = set()
    for login in ("", f"a:{planted()}@"):
        pipeline = vd.Pipeline("p", source=vd.parquet("s3://lake/x"), id="id")
        stage = pipeline.project("q", ["id"]).write("out", f"s3://{login}lake/out")
        found.add(stage_definition(pipeline, stage.spec))
    assert len(found) == 1


def test_what_is_masked():
    key, other, deep, plain, short = (planted() for _ in range(5))
    keep_options(
        {
            "key": key,
            "client_kwargs": {"headers": [{"X-Api-Key": other}], "region_name": plain},
            "token": {"private_key": f"-----\n{deep}\n-----", "project_id": short},
            "secret": "abcde",
        }
    )
    text = f"{key} {other} {plain} {short} abcde"
    assert masked(text) == f"*** *** {plain} {short} abcde"
    assert deep not in masked(repr({"private_key": f"-----\n{deep}\n-----"}))
    assert masked("https://me:word@host/x?sig=abc&y=1") == "https://***@host/x?sig=***&y=1"
    assert str(vd.StoreError(f"no {key}")) == "no ***"


def test_errors_without_a_class_of_this_package_are_masked_with_their_causes():
    secret = planted()
    keep_options({"secret": secret})
    with pytest.raises(RuntimeError) as raised, errors_masked():
        raise KeyError(secret) from FileNotFoundError(f"no {secret}")
    assert str(raised.value) == "KeyError: '***'"
    assert str(raised.value.__cause__) == "no ***"
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    untold = KeyError("x")
    with pytest.raises(KeyError) as same, errors_masked():
        raise untold
    assert same.value is untold


def test_wrapped_values_have_an_identity_of_their_value():
    class Login(BaseModel):
        password: SecretStr

    one, two = planted(), planted()
    assert value_digest(SecretStr(one)) == value_digest(SecretStr(one))
    assert value_digest(SecretStr(one)) != value_digest(SecretStr(two))
    logins = [Login(password=SecretStr(text)) for text in (one, one, two)]
    assert len({value_digest(login) for login in logins}) == 2


def test_arguments_are_not_shown():
    secret = planted()
    pipeline = vd.Pipeline("p", source=vd.parquet("/x"), id="id")
    stage = pipeline.map_batches(
        "m", Client, schema={"y": pa.int64()}, fn_kwargs={"password": secret},
        fn_constructor_kwargs={"api_key": secret, "wrapped": SecretStr(secret)},
    )  # fmt: skip
    assert secret not in repr(stage.spec)
    for wrong in ({"fn_kwargs": [secret]}, {"fn_kwargs": {1: secret}}, {"fn_args": secret}):
        with pytest.raises(vd.DefinitionError) as refused:
            pipeline.map_batches("n", Client, schema={"y": pa.int64()}, **wrong)
        assert secret not in str(refused.value)


def test_variables_in_the_options_of_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv("VANE_LAKE_LOGIN", secret := planted())
    given = {"client_kwargs": {"login": dg.EnvVar("VANE_LAKE_LOGIN")}, "n": 1}
    seen = []

    @dg.asset(required_resource_keys={"store"})
    def look(context) -> None:
        seen.append(context.resources.store.open().root.storage_options)

    store = vd.FragmentStore(root=str(tmp_path), storage_options=given)
    assert dg.materialize([look], resources={"store": store}).success
    assert [*seen, store.open().root.storage_options] == [
        {"client_kwargs": {"login": secret}, "n": 1}
    ] * 2


def test_a_variable_in_options_that_is_not_set():
    store = vd.FragmentStore(root="/x", storage_options={"secret": dg.EnvVar("VANE_NOT_SET")})
    with pytest.raises(vd.StoreError, match="'VANE_NOT_SET'"):
        store.open()
