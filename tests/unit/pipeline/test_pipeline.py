"""Declaring pipelines: what is accepted, and what is refused where it was written."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.types import sql
from vane_dagster.types.schema import parse_schema, sql_name, sql_type
from vane_dagster.types.sql import bind, referenced_columns

DAILY = dg.DailyPartitionsDefinition("2026-01-01")
SCHEMA = {"x": "BIGINT"}


class Model:
    """A class UDF."""

    def __init__(self, path: str = "", *, revision: int = 0) -> None:
        self.path = path

    def __call__(self, batch, scale=1):
        return batch


class Odd(Model):
    def check_health(self, deep): ...


def plain(batch, scale=1):
    """Doubles."""
    return batch


def pipeline(name: str = "docs", **given: Any) -> vd.Pipeline:
    return vd.Pipeline(name, **{"source": vd.parquet("/data/docs"), "id": "id", **given})


def test_a_relative_target_is_below_the_folder_of_the_declaration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    urls = {
        "out": f"{tmp_path}/out",
        "./a/../out/": f"{tmp_path}/out",
        "file://out": f"{tmp_path}/out",
        "~/out": "/home/me/out",
        "/out": "/out",
        "file:///out": "file:///out",
        "s3://lake/out": "s3://lake/out",
    }
    assert {url: published(url).spec.target.url for url in urls} == urls
    assert published(Path("/out")).spec.target.url == "/out"


def mapped(fn: Any = plain, **given: Any) -> vd.Stage:
    return pipeline().map_batches("m", fn, **{"schema": SCHEMA, **given})


def written_twice(url: str) -> vd.Stage:
    made = projected({"x": "x"})
    made.write("one", url)
    return made.write("two", url)


def projected(columns: Any, **given: Any) -> vd.Stage:
    return pipeline().project("p", columns, **given)


def joined_across() -> vd.Stage:
    one, other = pipeline("one"), pipeline("other")
    return one.join("j", one.project("a", ["x"]), other.project("b", ["y"]))


def joined(*names: str, **given: Any) -> vd.Stage:
    docs = pipeline()
    stages = {name: docs.project(name, ["x"]) for name in dict.fromkeys(names)}
    return docs.join("j", *(stages[name] for name in names), **given)


def published(url: str = "/out", **given: Any) -> vd.Stage:
    return pipeline().project("p", ["x"]).write("w", url, **given)


def twice(second: str) -> vd.Stage:
    docs = pipeline()
    docs.project("clean", ["x"])
    return docs.project(second, ["x"])


def by_region(url: str = "/d/{partition_key.region}") -> vd.Pipeline:
    regions = dg.MultiPartitionsDefinition(
        {"day": DAILY, "region": dg.StaticPartitionsDefinition(["eu", "us"])}
    )
    return pipeline(source=vd.parquet(url), partitions_def=regions)


REFUSED = {
    # pipelines and sources
    "pipeline name": (lambda: pipeline("my docs"), ["'my docs'", "letters, digits and '_'"]),
    "source is text": (lambda: pipeline(source="/data"), ["'docs'", "a str", "vd.parquet(url)"]),
    "id is a number": (lambda: pipeline(id=7), ["id is 7", "name of the id column"]),
    "placeholder without partitions": (
        lambda: pipeline(source=vd.parquet("/data/{partition_key}")),
        ["'docs'", "{partition_key}", "no partitions_def", "give it one"],
    ),
    "partitions without placeholder": (
        lambda: pipeline(partitions_def=DAILY),
        ["'/data/docs'", "has no {partition_key}", "put it in"],
    ),
    "unknown dimension": (
        lambda: by_region("/d/{partition_key.country}"),
        ["dimension 'country'", "'day', 'region'"],
    ),
    "bound of no time window": (
        lambda: pipeline(
            source=vd.parquet("/d/{partition_start:%Y}"),
            partitions_def=dg.StaticPartitionsDefinition(["a"]),
        ),
        ["{partition_start:%Y}", "partitions_def has none", "write {partition_key}"],
    ),
    "bound of two time windows": (
        lambda: pipeline(
            source=vd.parquet("/d/{partition_start:%Y}"),
            partitions_def=dg.MultiPartitionsDefinition(
                {"day": DAILY, "month": dg.MonthlyPartitionsDefinition("2026-01-01")}
            ),
        ),
        ["the dimensions 'day', 'month' have one each", "write {partition_key}"],
    ),
    "target of a time window": (
        lambda: by_region().project("p", ["x"]).write("w", "/out/{partition_end}"),
        ["'docs/w'", "{partition_end}", "a target can name the key only"],
    ),
    "target of one dimension": (
        lambda: by_region().project("p", ["x"]).write("w", "/out/{partition_key.day}"),
        [
            "'docs/w'", "does not name the dimension 'region'", "would share a folder",
            "{partition_key.day}/{partition_key.region}, or {partition_key}",
        ],
    ),
    # stages
    "stage name": (lambda: twice("2nd"), ["'docs/2nd'", "does not begin with a digit"]),
    "duplicate stage": (lambda: twice("clean"), ["'docs/clean'", "already has a stage with"]),
    "no stages": (lambda: pipeline().build_assets(), ["'docs'", "no stages", "add one"]),
    # project
    "not SQL": (lambda: projected({"x": "trim("}), ["'docs/p', column 'x'", "not valid SQL"]),
    "window": (
        lambda: projected({"x": "row_number() OVER ()"}),
        ["column 'x'", "a window function", "one row at a time", "upstream of the pipeline"],
    ),
    "time of the run": (
        lambda: projected({"x": "coalesce(t, now())"}),
        ["column 'x'", "now(), which is not a function of the row", "as a constant"],
    ),
    "a macro": (lambda: projected({"x": "pg_postmaster_start_time()"}), ["a retry would give"]),
    "a file": (lambda: projected({"x": "read_text('a')"}), ["the table function read_text()"]),
    "subquery": (lambda: projected({"x": "(SELECT max(y) FROM t)"}), ["holds a subquery"]),
    "star": (lambda: projected({"x": "*"}), ["write include_columns=True"]),
    "unnest": (lambda: projected({"x": "unnest(words)"}), ["unnest()", "many rows of one"]),
    "computed id": (
        lambda: projected({"id": "upper(id)"}),
        ["the id 'id' is computed by 'upper(id)'", "pass through unchanged", "another name"],
    ),
    "columns of two cases": (
        lambda: mapped(schema={"Text": "VARCHAR", "text": "VARCHAR"}),
        ["'docs/m'", "'Text' and 'text' are the same name to SQL"],
    ),
    "an id in another case": (
        lambda: projected({"ID": "id"}),
        ["'docs/p'", "'id' and 'ID' are the same name to SQL"],
    ),
    "a result named like the id": (
        lambda: pipeline().map("id", plain, columns={"batch": "x"}, schema="VARCHAR"),
        ["'docs/id'", "the column 'id', which is an id", "another name"],
    ),
    # join and write
    "two stages with a target": (
        lambda: written_twice("/out"),
        ["'docs/two'", "'one' already publishes to", "its own target"],
    ),
    "join across pipelines": (
        joined_across,
        ["'one/j'", "<Stage other/b", "not a stage of pipeline 'one'", "fragments and id"],
    ),
    "join with itself": (lambda: joined("a", "a"), ["joins 'a', 'a'", "two or more different"]),
    "write of the source": (
        lambda: pipeline().write("w", "/out"),
        ["'docs/w'", "a source cannot be published directly", "add a project"],
    ),
    "stage below a write": (
        lambda: published().project("q", ["x"]),
        ["'docs/q'", "'w'", "which no stage can read"],
    ),
}  # fmt: skip


NET = type("Net", (type("Module", (), {"__module__": "torch.nn"}),), {})
MAPPED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (Model(), {}, ["'docs/m'", "Model was given", "stays warm", "functools.partial"]),
    (Model().__call__, {}, ["Model.__call__ was given as a method", "@vd.cls, so that"]),
    (
        functools.partial(Model, "a"), {"fn_constructor_kwargs": {"revision": 1}},
        ["Model(...) has its constructor's arguments already", "fn_constructor_kwargs"],
    ),
    (NET(), {}, ["Net was given", "in __init__"]),
    (Model.__call__, {}, ["Model.__call__ was given", "with @vd.cls"]),
    (functools.cache(plain), {}, ["plain is wrapped in a _lru_cache_wrapper", "decorator"]),
    (Odd, {}, ["check_health(self, deep) cannot be called as"]),
    (plain, {"fn_constructor_kwargs": {"path": "a"}}, ["plain is a function", "fn_kwargs"]),
    (plain, {"fn_kwargs": {"scle": 2}}, ["plain", "'scle'", "(batch, **fn_kwargs)"]),
    (Model, {"fn_constructor_kwargs": {"pth": "a"}}, ["'pth'", "**fn_constructor_kwargs"]),
    (plain, {"batch_format": "jax"}, ["'jax'", "'pyarrow', 'numpy', 'pandas', 'torch', 'polars'"]),
    (plain, {"batch_size": 2.5}, ["batch_size is 2.5", "whole number"]),
    (plain, {"gpus": 1}, ["gpus=1 for the function plain", "write a class", "__init__"]),
    (Model, {"concurrency": 0}, ["concurrency is 0", "(min, max)"]),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "given", "words"), MAPPED)
def test_functions_and_options_that_a_map_refuses(fn, given, words):
    with pytest.raises(vd.errors.DefinitionError) as raised:
        mapped(fn, **given)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("case", REFUSED)
def test_refused_where_it_was_written(case):
    declare, words = REFUSED[case]
    with pytest.raises((vd.errors.DefinitionError, vd.errors.SchemaError)) as raised:
        declare()
    for word in words:
        assert word in str(raised.value)


TYPES = {
    "DECIMAL(10,2)": pa.decimal128(10, 2),
    "ENUM('a', 'b')": pa.string(),
    "JSON": pa.string(),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
    "FLOAT[2][3]": pa.list_(pa.list_(pa.float32(), 2), 3),
    'STRUCT("a ""b" INTEGER, b FLOAT[3])': pa.struct(
        [('a "b', pa.int32()), ("b", pa.list_(pa.float32(), 3))]
    ),
}


@pytest.mark.parametrize("text", TYPES)
def test_types_and_their_names(text):
    """The plain ones are in `test_plain_types_are_those_of_duckdb`."""
    kind = parse_schema({"x": text}, "here").field("x").type
    assert kind == TYPES[text]
    assert sql_type(sql_name(kind)) == kind


def test_types_as_arrow_has_them():
    given = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.field("e", pa.float32()), 2))])
    parsed = parse_schema(given, "here")
    assert parsed == pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32(), 2))])
    assert parse_schema({"x": pa.int8()}, "here").field("x").type == pa.int8()


BAD_SCHEMAS = {
    "unknown type": ({"x": "BIGNIT"}, ["column 'x'", "unknown type 'BIGNIT'", "Use a DuckDB"]),
    "empty": ({}, ["no columns"]),
    "interval": ({"x": "INTERVAL"}, ["column 'x'", "Parquet cannot hold", "::VARCHAR"]),
    "case": ({"x": "INT", "X": "INT"}, ["'x' and 'X'", "rename one"]),
    "twice": (pa.schema([("x", pa.int8()), ("x", pa.int8())]), ["'x' and 'x'"]),
}


@pytest.mark.parametrize("case", BAD_SCHEMAS)
def test_refused_schemas(case):
    schema, words = BAD_SCHEMAS[case]
    with pytest.raises(vd.errors.SchemaError) as raised:
        mapped(schema=schema)
    for word in ["'docs/m'", *words]:
        assert word in str(raised.value)


def test_no_function_that_duckdb_declares_as_unstable_is_accepted():
    query = (
        "SELECT function_name, unnest(list(DISTINCT len(parameters))) FROM duckdb_functions() "
        "WHERE function_type = 'scalar' AND function_name <> 'error' "
        "GROUP BY function_name HAVING bool_and(stability <> 'CONSISTENT')"
    )
    found = duckdb.sql(query).fetchall()
    assert {"now", "today", "random", "uuid", "nextval", "setseed", "getvariable"} < dict(
        found
    ).keys()
    for name, parameters in found:
        text = f"1 + {name}({', '.join(['n'] * parameters)})"
        with pytest.raises(vd.errors.DefinitionError, match="not a function of the row"):
            referenced_columns(text, "here")


def test_no_macro_that_calls_such_a_function_is_accepted():
    query = (
        "SELECT lower(function_name), lower(macro_definition), len(parameters) "
        "FROM duckdb_functions() WHERE function_type = 'macro'"
    )
    functions = sql._functions()
    wrong = {each for each, kinds in functions.items() if kinds & {"aggregate", "unstable"}}
    wrong |= {"unnest", "(select", "current_timestamp", "current_user"}
    found = duckdb.sql(query).fetchall()
    for name, definition, parameters in found:
        if wrong & set(re.findall(r"\(select|[a-z_]\w+(?=\()|current_\w+", definition)):
            with pytest.raises(vd.errors.DefinitionError):
                referenced_columns(f"1 + {name}({', '.join(['n'] * parameters)})", "here")


def test_functions_of_times_that_depend_on_the_zone_are_accepted():
    """DuckDB declares some of their types as consistent within a query alone."""
    for text in ("n + 1", "n - 1", "date_trunc('day', n)", "year(n)", "strftime(n, '%d')"):
        assert referenced_columns(text, "here") == {"n"}


def test_a_column_is_not_named_by_its_position():
    for text in ("#1", "#2 + 1", "list_transform([n], x -> x + #1)"):
        with pytest.raises(vd.errors.DefinitionError, match=r"by its position, #.*Name the column"):
            referenced_columns(text, "here")
    with pytest.raises(vd.errors.DefinitionError, match=r"'docs/q'.*by its position, #1"):
        pipeline().project("q", {"x": "#1"})
    assert referenced_columns("'#1' || \"#2\"", "here") == {"#2"}


def test_names_that_sql_takes_for_the_time_are_columns_only_where_there_is_one():
    given = pa.schema([("id", pa.int64()), ("Current_Date", pa.int32())])
    for columns, where in (
        ((("x", "current_timestamp"),), None),
        ((("x", "localtime"),), None),
        ((("x", "rowid"),), None),
        ((("x", "[user]"),), None),
        ((("id", "id"),), "id > epoch(current_timestamp)"),
    ):
        with pytest.raises(vd.errors.DefinitionError, match="which is not a function of the row"):
            bind(columns, where, given, "here")
    own = (("x", "current_date"), ("y", "current_date + 1"), ("z", "list_sum([id, 1])"))
    assert bind(own, None, given, "here").field("x").type == pa.int32()


def test_a_row_is_not_a_value():
    given = pa.schema([("id", pa.int64())])
    for text in ("to_json(source)", "Source", "source.id || source::VARCHAR"):
        with pytest.raises(vd.errors.DefinitionError, match=r"'source' as a whole row"):
            bind((("x", text),), None, given, "here")
    bind((("x", "source.id + 1"),), None, given, "here")
    named = pa.schema([("source", pa.string())])
    assert bind((("x", "upper(source)"),), None, named, "here").field("x").type == pa.string()


def test_an_expression_whose_values_no_column_can_hold():
    given = pa.schema([("id", pa.int64())])
    for text in ("id::UHUGEINT", "['12:00:00+02'::TIMETZ]", "{'a': id::BIT}"):
        with pytest.raises(
            vd.errors.SchemaError, match=r"cannot hold all of its values.*::VARCHAR"
        ):
            bind((("x", text),), None, given, "here")


def test_the_id_is_carried_along_and_can_be_named():
    left_out = projected({"x": "n"}).spec.columns
    named = projected({"x": "n", "id": "source.ID"}).spec.columns
    assert left_out == (("id", '"id"'), ("x", "n"))
    assert named == (("x", "n"), ("id", "source.ID"))


def test_accepted_shapes():
    assert mapped(Model, concurrency=3).spec.concurrency == (3, 3)
    assert mapped(Model, concurrency=[1, 4]).spec.concurrency == (1, 4)
    assert mapped(Model).spec.concurrency == (1, 1)
    assert mapped(Model, concurrency="auto").spec.concurrency is None, "up to the cluster"
    assert mapped(plain).spec.concurrency is None
    assert mapped(Model, gpus=0.25).spec.bundle == {"GPU": 0.25}
    partial = mapped(functools.partial(functools.partial(plain, scale=2), scale=3)).spec.udf
    assert (partial.target, partial.kwargs) == (plain, {"scale": 3})
    loaded = mapped(functools.partial(Model, "a", revision=1)).spec.udf
    assert (loaded.stateful, loaded.constructor_args) == (True, ("a",))
    assert loaded.constructor_kwargs == {"revision": 1}
    assert mapped(fn_kwargs={"scale": 2}).spec.udf.kwargs == {"scale": 2}
    workers = vd.Workers(num_cpus=2, memory=10, accelerator_type="A100", resources={"disk": 1})
    every = mapped(Model, gpus=1, concurrency=workers)
    assert every.spec.bundle == {
        "CPU": 2, "GPU": 1, "memory": 10, "disk": 1, "accelerator_type:A100": 0.001,
    }  # fmt: skip


def test_exported_names():
    assert dir(vd) == sorted(vd.__all__)
    assert all(getattr(vd, name) is not None for name in vd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Dataset'"):
        vd.Dataset  # noqa: B018  # looking it up raises


def test_every_error_is_of_one_family():
    """But for those that a user's own code raises, and those of rows."""
    errors = {getattr(vd.errors, name) for name in vars(vd.errors) if name.endswith("Error")}
    others = {error for error in errors if not issubclass(error, vd.errors.VaneError)}
    assert others == {vd.errors.StageError, vd.errors.CostlyError}
    assert not issubclass(vd.errors.RowErrors, vd.errors.VaneError)
