"""Reading stored assets as Ray Datasets."""

from __future__ import annotations

import uuid

import pytest

import vane_dagster as vd
from support.stored import (
    keep,
    local_store,  # noqa: F401  # fixture
    table,
)
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_data(local_store, s3, ray_data):
    """An asset reads and keeps those of a local store, in test_io_manager.py."""
    far = Store(Location(f"s3://lake/{uuid.uuid4().hex}", s3))
    for store in (local_store, far):
        keep(store, "docs", "a", table(0, 3))
        keep(store, "docs", "b", table(5, 2))
        keep(store, "docs", "day=1", table(0, 0))
        read = vd.load("docs", as_=ray_data.Dataset, store=store, columns=["id"])
        assert isinstance(read, ray_data.Dataset)
        assert read.schema().names == ["id"]
        if store is far:
            assert sorted(row["id"] for row in read.take_all()) == [0, 1, 2, 5, 6]
        assert vd.load("docs", "day=1", as_=ray_data.Dataset, store=store).count() == 0
