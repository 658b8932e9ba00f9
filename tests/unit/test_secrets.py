"""Secrets in URLs, options, errors and arguments: what is masked."""

from __future__ import annotations

import dagster as dg
import pyarrow as pa
import pytest
from pydantic import BaseModel, SecretStr

import vane_dagster as vd
from support.planted import Client, planted
from vane_dagster._secrets import (
    errors_masked,
    keep_arguments,
    keep_options,
    masked,
)
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.storage.filesystem import StoragePath


@pytest.mark.parametrize(
    "url",
    [
        "s3://id:{}@lake/x", "s3://id:{}/+@lake/x", "https://me:{}@host/x", "https://{}@host/x",
        "sftp://me:{}@host/x", "hdfs://me:{}@host/x", "https://host/x?sig={}",
        "https://host/x?y=1&X-Amz-Signature={}", "https://host/x?token={}",
        "https://host/x?api_key={}",
    ],
)  # fmt: skip
def test_a_url_with_a_password_or_a_signature_is_refused(url):
    secret = planted()
    pipeline = vd.Pipeline("p", source=vd.parquet("s3://lake/x"), id="id")
    stage = pipeline.project("q", ["id"])
    sources = (vd.parquet, vd.delta, vd.files, vd.images, vd.csv, vd.json, vd.text)
    for use in (*sources, lambda url: stage.write("out", url), StoragePath):
        with pytest.raises(vd.errors.VaneError, match="credentials in storage_options") as refused:
            use(url.format(secret))
        assert secret not in str(refused.value)


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
        with pytest.raises(vd.errors.DefinitionError) as refused:
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
