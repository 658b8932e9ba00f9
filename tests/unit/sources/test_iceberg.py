"""Iceberg sources as they are declared, and what their spans say."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

import vane_dagster as vd

SECRET = "a-secret-that-nobody-writes-down"


@pytest.mark.parametrize(
    ("catalog", "given", "words"),
    [
        (7, {}, "catalog is a int; expected the name of a catalog"),
        ("", {}, "catalog is a str; expected the name"),
        ({"name": 3}, {}, "catalog is a dict; expected the name"),
        ("prod", {"table": "events"}, "table is 'events'; expected the namespace and name"),
        ("prod", {"table": "db.{partition_key}"}, "table is 'db.{partition_key}'; expected"),
        ("prod", {"snapshot": True}, "snapshot is True; expected a snapshot id"),
        ("prod", {"filter": " "}, "filter is ' '; expected a row filter as text"),
        ("prod", {"columns": "id"}, "columns is 'id'; expected a list of names"),
    ],
)
def test_what_is_refused_where_it_is_declared(catalog, given, words):
    with pytest.raises(vd.DefinitionError, match=r"vd\.iceberg: ") as raised:
        vd.iceberg(catalog, **{"table": "db.events", **given})
    assert words in str(raised.value)


def test_a_catalog_in_every_form():
    named = vd.iceberg("prod", "db.events", filter="day = '{partition_key}' and n > 3")
    assert named.place == "prod.db.events"
    assert named.url_for("it's") == "prod.db.events where day = 'it''s' and n > 3"
    properties = {"type": "sql", "uri": "sqlite:///c.db", "token": SECRET}
    assert vd.iceberg(properties, "db.events").place == "default.db.events"
    given = vd.iceberg({**properties, "name": "test"}, "db.events")
    opened = SimpleNamespace(name="test", properties=properties)
    assert vd.iceberg(opened, "db.events") == given
    assert given.place == "test.db.events"
    assert SECRET not in repr(given)
    assert pickle.loads(pickle.dumps(given.for_workers())).catalog == given.catalog
