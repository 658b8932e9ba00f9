"""Schemas that are inferred from the first rows, and previews."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import InProcessCompute


def label(text: str) -> Any:
    return {"label": text.upper(), "score": len(text) / 2}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["score"] * 2}


def docs(tmp_path: Path, fn: Any = label, **options: Any) -> vd.Pipeline:
    ids = range(60)
    write_source(tmp_path / "src", {"id": ids, "n": ids, "text": [f"t{n}" for n in ids]})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    clean = made.project("clean", {"text": "text", "n": "n"})
    labels = clean.map("labels", fn, schema="infer", include_columns=["n"], **options)
    labels.map_batches("twice", doubled, schema="infer", batch_format="numpy")
    return made


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    return {"store": str(tmp_path / "store"), "compute": InProcessCompute()}


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path) for path in (tmp_path / "store").rglob("*") if path.is_file())


def test_a_stage_has_one_pin_whether_it_runs_alone_or_not(tmp_path, given, capsys):
    labels = 'schema={"label": "VARCHAR", "score": "DOUBLE"}'
    docs(tmp_path).run(select=["clean", "labels"], **given)
    assert (
        f"stage 'labels': its schema was inferred from 16 rows: {labels}" in capsys.readouterr().out
    )
    before = files(tmp_path)
    assert docs(tmp_path)["twice"].preview(2, **given).table["twice"].to_pylist() == [2.0, 2.0]
    assert files(tmp_path) == before
    assert (
        f"stage 'labels': its schema was inferred from 16 rows: {labels}\n"
        in capsys.readouterr().out
    )

    alone = docs(tmp_path)
    write_source(tmp_path / "src", {"id": ["not read"], "n": [0], "text": ["x"]})
    alone.run(select="twice", **given)
    docs(tmp_path).run(**given)
    assert "twice: partitions: 1 up to date" in capsys.readouterr().out
    (pin,) = (tmp_path / "store" / "docs" / "twice" / "schemas").glob("*.json")
    assert json.loads(pin.read_text())["rows"] == 16


def test_checks_may_name_inferred_columns(tmp_path, given):
    def ones(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ones": np.ones((len(batch["id"]), 3))}

    made = vd.Pipeline("ones", source=vd.table({"id": [1, 2, 3]}), id="id")
    asset = vd.Asset(checks=[vd.checks.Vectors(), vd.checks.NullRate(columns=["ones"])])
    made.map_batches("v", ones, schema="infer", batch_format="numpy", asset=asset)
    made.run(**given)
    assert vd.load("ones/v", store=given["store"]).num_rows == 3


def later(text: str) -> Any:
    return {"score": 1 if int(text[1:]) < 20 else "many"}


def fails(text: str) -> Any:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (
            later,
            {},
            ["column 'score': expected int64, found string", "{'score': 'VARCHAR'} in the"],
        ),
        (fails, {"on_error": "quarantine"}, ["none of the first", "no luck"]),
    ],
)
def test_what_cannot_be_inferred_is_named(tmp_path, given, fn, options, words):
    with pytest.raises(vd.errors.VaneError) as raised:
        docs(tmp_path, fn, **options).run(select=["clean", "labels"], **given)
    for word in ("'docs/labels'", *words):
        assert word in str(raised.value)
    assert not raised.value.is_permanent, "rows may fail by a transient error"


def partitioned(tmp_path: Path) -> vd.Pipeline:
    keys = [f"p{n}" for n in range(6)]
    for key in keys:
        ids = pa.array(range(20 if key == "p5" else 0), pa.int64())
        write_source(tmp_path / "src" / key, {"id": ids, "n": ids})
    made = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}"), allow_empty=True),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    made.map("labels", lambda n: n / 2, schema="infer", columns={"n": "n"})
    return made


def test_empty_partitions_may_come_first(tmp_path, given):
    made = partitioned(tmp_path)
    for partition in ("p5", None):
        shown = made["labels"].preview(3, partition=partition, **given).table["labels"].to_pylist()
        assert shown == [0, 0.5, 1]
    assert files(tmp_path) == []  # nor has it decided how files are cut into fragments
    made.run(**given)
    assert read_stage(tmp_path / "store", "docs", "labels", "p5").num_rows == 20
    assert read_stage(tmp_path / "store", "docs", "labels", "p0").schema.names == ["id", "labels"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "p9"}, "there is no partition 'p9'; the first is 'p0', the last 'p5'"),
        ({"rows": 0}, "rows is 0"),
        ({"compute": vd.RayCompute()}, "pass store= too"),
    ],
)
def test_a_wrong_argument_of_a_preview_is_refused(tmp_path, options, words):
    with pytest.raises(vd.errors.DefinitionError, match=words):
        partitioned(tmp_path)["labels"].preview(**options)
