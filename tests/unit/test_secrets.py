"""Secrets in URLs, options, errors and arguments: what is masked."""

from __future__ import annotations

import pickle

import dagster as dg
import pyarrow as pa
import pytest
from pydantic import BaseModel, SecretStr

import vane_dagster as vd
from support.planted import (
    Client,
    denying,  # noqa: F401  # fixtures
    planted,
)
from vane_dagster._secrets import (
    errors_masked,
    keep_arguments,
    keep_options,
    masked,
    url_parts,
)
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.storage.filesystem import Location


def test_a_password_in_a_url_is_a_storage_option(denying):
    secret = f"{planted()}/+"
    denying.password = secret
    quoted = secret.replace("/", "%2F").replace("+", "%2B")
    place = f"127.0.0.1:{denying.server_port}/a"
    folder = Location(f"http://reader:{quoted}@{place}")
    assert folder.url == f"http://{place}"
    assert folder.read("b") == b"rows"
    assert pickle.loads(pickle.dumps(folder)).child("c").read("d") == b"rows"
    with pytest.raises(vd.errors.StoreError) as raised:
        Location(f"http://reader:no{quoted}@{place}").read("b")
    text = f"{raised.value} {raised.value.__cause__} {folder}"
    assert secret not in text
    assert quoted not in text

    options = {"endpoint_url": "http://x"}
    source = vd.parquet(f"s3://id:{quoted}@lake/x", storage_options=options)
    assert source.url == "s3://lake/x"
    assert source.storage_options == {"key": "id", "secret": secret, **options}
    assert vd.parquet("s3://id:a/b+c@lake/x").storage_options["secret"] == "a/b+c"
    assert vd.parquet("sftp://me:word@host/x").storage_options["password"] == "word"
    for plain in ("abfs://container@account.dfs.core.windows.net/x", "s3://lake/a:b", "/a:b@c"):
        assert url_parts(plain) == (plain, {})
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
    assert str(vd.errors.StoreError(f"no {key}")) == "no ***"


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
    for wrong in (
        {"fn_kwargs": [secret]},
        {"fn_kwargs": {1: secret}},
        {"fn_constructor_args": secret},
    ):
        with pytest.raises(vd.DefinitionError) as refused:
            pipeline.map_batches("n", Client, schema={"y": pa.int64()}, **wrong)
        assert secret not in str(refused.value)


def test_a_variable_in_options_that_is_not_set():
    store = vd.FragmentStore(root="/x", storage_options={"secret": dg.EnvVar("VANE_NOT_SET")})
    with pytest.raises(vd.errors.StoreError, match="'VANE_NOT_SET'"):
        store.open()


SECRET_NAMES = [
    "X-Api-Key", "api-key", "x-goog-api-key", "apikey", "apiKey", "API_KEY", "access-key",
    "AWS_SECRET_ACCESS_KEY", "accessKey", "private-key", "account.key", "Cookie", "Set-Cookie",
    "auth", "X-Auth", "bearer", "pwd", "DB_PWD", "passwd", "x-amz-security-token", "accessToken",
    "Authorization", "Proxy-Authorization", "sas-token", "connection-string", "client-secret",
]  # fmt: skip
ORDINARY_NAMES = [
    "author", "authority", "key", "keys", "keyword", "sort-key", "token_count", "max_tokens",
    "maxTokens", "tokens", "tokenizer", "token-type", "bearer_name", "pwd_hint_length", "monkey",
    "X-Request-Id", "cookies_enabled", "compass", "accessKind",
]  # fmt: skip


@pytest.mark.parametrize("name", [*SECRET_NAMES, *ORDINARY_NAMES])
def test_names_that_mark_secrets_however_they_are_written(name):
    value = planted()
    keep_arguments({"headers": {name: value}})
    shown = "***" if name in SECRET_NAMES else value
    assert masked(f"refused: {value}") == f"refused: {shown}"
