"""Stages that make many rows of one, as they are declared and keyed."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from support.sentences import ASIDE, SCHEMA, pipeline, split, words
from vane_dagster.planning.definition import stage_definition


def test_keys_of_a_left_join_change_only_where_its_lists_do(tmp_path):
    def definitions(how, **failures):
        docs = pipeline(tmp_path)
        clean = docs.project("clean", ["text"])
        return stage_definition(
            docs, docs.join("j", clean, words(clean, **failures), how=how, children="list").spec
        )

    assert definitions("left") != definitions("left", **ASIDE)
    assert definitions("inner") == definitions("inner", **ASIDE)


def test_declarations_that_do_not_fit():
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    with pytest.raises(vd.errors.DefinitionError, match="cardinality is 'one_to_many'; expected"):
        docs.map_batches("a", split, schema=SCHEMA, cardinality="one_to_many")
    with pytest.raises(
        vd.errors.DefinitionError, match=r"vd\.Children: id is ''; expected the name of a"
    ):
        vd.Children("")
    with pytest.raises(
        vd.errors.DefinitionError, match=r"'id' .*: write cardinality=vd.Children\(id="
    ):
        docs.map_batches("a", split, schema=SCHEMA, id="word_id")
    with pytest.raises(vd.errors.DefinitionError, match="give the new id a name of its own"):
        docs.map_batches("a", split, schema=SCHEMA, cardinality=vd.Children("id"))
    made = words(docs)
    other = docs.map_batches("others", split, schema=SCHEMA, cardinality=vd.Children("word_id"))
    clean = docs.project("clean", ["text"])
    with pytest.raises(vd.errors.DefinitionError, match="say children='rows'"):
        docs.join("joined", clean, made)
    with pytest.raises(vd.errors.DefinitionError, match="neither was made from the other"):
        docs.join("joined", made, other, children="rows")
    with pytest.raises(vd.errors.DefinitionError, match="name 'words' first"):
        docs.join("joined", clean, made, children="rows", how="left")
    with pytest.raises(vd.errors.DefinitionError, match="ids pass through unchanged"):
        made.project("computed", {"id": "id + 1"})
    docs.join("joined", clean, made, other, children="list")
