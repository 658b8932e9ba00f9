"""Reading what a store on S3 holds."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

# F403: all tests of the contract run here, on S3.
from support.reader_contract import *  # noqa: F403  # the contract's tests
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


@pytest.fixture(params=["s3"])
def store(request: pytest.FixtureRequest, s3: dict[str, Any]) -> Store:
    return Store(Location(f"s3://lake/{uuid.uuid4().hex}", s3))
