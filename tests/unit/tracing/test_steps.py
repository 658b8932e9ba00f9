"""The command that traces a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store
from vane_dagster.tracing.command import trace_command


def manifest(id: str | None, partition: str | None = None) -> Any:
    sample = [] if id is None else [{"id": id}]
    return SimpleNamespace(
        pipeline="docs", stage="clean", partition=partition, keys=("id",), sample=sample
    )


@pytest.mark.parametrize(
    ("id", "partition", "arguments"),
    [
        ("7", None, "--id 7"),
        ("7", "a b", "--partition 'a b' --id 7"),
        ("it's", None, """--id 'it'"'"'s'"""),
        ("-7", None, "--id=-7"),
    ],
)
def test_the_command_of_a_trace_is_quoted(id, partition, arguments):
    command = trace_command(Store(Location("/s")), manifest(id, partition))
    assert command == f"vane-dagster trace docs/clean {arguments} --store /s"


@pytest.mark.parametrize("id", [None, "cut…", "a`b", "a\nb"])
def test_an_id_that_cannot_stand_in_a_command_has_none(id):
    assert trace_command(Store(Location("/s")), manifest(id)) is None
