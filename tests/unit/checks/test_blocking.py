"""Checks that are refused where they are written."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from support.embedded import SCHEMA, embed
from vane_dagster import checks


def test_a_check_that_blocks_is_an_error(tmp_path):
    assert checks.NullRate().severity == "WARN"
    assert checks.NullRate(blocking=True).severity == "ERROR"


def test_wrong_checks_are_refused_where_they_are_written():
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    with pytest.raises(vd.DefinitionError, match="is no check"):
        docs.map_batches("v", embed, schema=SCHEMA, asset=vd.Asset(checks=["null_rate"]))
    with pytest.raises(vd.DefinitionError, match="'docs/v'"):
        docs.map_batches(
            "v", embed, schema=SCHEMA, asset=vd.Asset(checks=[checks.Vectors(columns=["label"])])
        )
    with pytest.raises(vd.DefinitionError, match="turns off no check"):
        docs.project("v", ["text"], asset=vd.Asset(checks=[checks.Off("vectors")]))
