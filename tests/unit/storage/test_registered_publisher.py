"""A publisher of another format, registered as ours are, through the calls of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.manifests import manifest, part
from support.store_contract import commit
from vane_dagster.orchestration.metadata import stage_metadata
from vane_dagster.planning.definition import stage_definition
from vane_dagster.storage import gc
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import (
    Manifest,
    ManifestName,
    Published,
)
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.publish import registry
from vane_dagster.storage.publish.base import STAGING, Publisher, staged_parts
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.reader import places
from vane_dagster.storage.store import Store


class JsonLines(Publisher):
    """A file of JSON lines a part, in a folder a partition."""

    has_folder_per_partition = False
    holds_parquet = False
    options = MappingProxyType({"root_key": None})

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self.target = Location(declared.url).child(str(partition))
        self.staging = self.target.child(STAGING)

    @classmethod
    def validate(
        cls, declared: Target, where: str, partitioned: bool, columns: Sequence[str]
    ) -> Target:
        if declared.options["root_key"] == "":
            raise vd.DefinitionError(f"{where}: root_key is empty")
        return declared

    def check(self, schema: pa.Schema, location: str) -> None:
        pass

    def planned(self, manifest: Manifest) -> Published:
        return Published(self.target.url, [f"{p.name}.jsonl" for p in manifest.parts], "jsonl")

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        for info, name in zip(manifest.parts, manifest.published.files):
            if name not in self.target.names():
                rows = read_part(self.staging, info.name).to_pylist()
                key = self._declared.options["root_key"]
                lines = (json.dumps({key: row} if key else row) for row in rows)
                self.target.write(name, "\n".join(lines).encode())
        return manifest.published

    def holds(self, files: Sequence[str]) -> bool:
        return set(files) <= set(self.target.names())

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        self.target.delete(sorted({name for named in former for name in named} - set(files)))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PUBLISHERS, "jsonl", f"{__name__}:JsonLines")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(Location(str(tmp_path / "store")))


def declare(tmp_path, options: dict[str, str] | None = None) -> vd.Stage:
    docs = vd.Pipeline("docs", source=vd.parquet("/src"), id="id")
    return docs.project("clean", ["id"]).write(
        "out", f"{tmp_path}/out", format="jsonl", options=options
    )


def publish(store: Store, publisher: Publisher, rows: dict[str, list[int]], plan: str = "0") -> Any:
    """Publish rows by fragment key."""
    parts = [
        part(publisher.staging, ids, key=key * 40, compression=publisher.compression)
        for key, ids in rows.items()
    ]
    made = manifest(parts, None, "out", plan)
    made = replace(made, kind="write", keys=("id",), reads=("clean",))
    return commit(store, made, publish=publisher, folder=publisher.staging)


def published(tmp_path) -> list[dict[str, int]]:
    files = sorted((tmp_path / "out").rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_commit_publishes_and_replaces_a_partition(tmp_path, store):
    spec = declare(tmp_path).spec
    publisher = spec.publisher(None)
    assert isinstance(publish(store, publisher, {"a": [1, 2], "b": [3]}), ManifestName)
    assert published(tmp_path) == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert publisher.staging.names() == {}

    name = publish(store, publisher, {"c": [4]}, "1")
    assert published(tmp_path) == [{"id": 4}]
    in_force = store.read("docs", "out", None, name)
    assert in_force.published.format == "jsonl"
    found = stage_metadata(spec, None, in_force, name, store, {}, 1)
    assert found["dagster/uri"] == f"{tmp_path}/out/None"


def test_a_reader_names_the_stage_to_read_instead(tmp_path, store):
    publisher = declare(tmp_path).spec.publisher(None)
    name = publish(store, publisher, {"a": [1]})
    with pytest.raises(
        vd.errors.StoreError, match=r"is published as 'jsonl'.*upstream stage 'clean'"
    ):
        places(store, store.read("docs", "out", None, name))


def test_a_formats_own_options_are_validated_and_part_of_the_definition(tmp_path):
    with pytest.raises(vd.DefinitionError, match="root_key is empty"):
        declare(tmp_path, {"root_key": ""})
    plain, keyed = declare(tmp_path), declare(tmp_path, {"root_key": "doc"})
    definitions = [stage_definition(stage.pipeline, stage.spec) for stage in (plain, keyed)]
    assert definitions[0] != definitions[1]
    with pytest.raises(vd.DefinitionError, match="'root_key'; format='parquet' takes none"):
        plain.pipeline["clean"].write("other", "/other", options={"root_key": "doc"})


def test_what_a_killed_run_has_staged_is_collected(tmp_path, store):
    publisher = declare(tmp_path).spec.publisher(None)
    store.keep_target("docs", "out", str(tmp_path / "out" / "None"), "jsonl")
    url = publisher.staging.file_url(part(publisher.staging).name)
    later = gc.GcPolicy(now=4e9, keep=10, grace=10)
    assert [list(found.condemned) for found in gc.collect(store, later)] == [[url]]
    assert store.target("docs", "out") == (str(tmp_path / "out" / "None"), "jsonl")


def test_a_format_that_is_not_registered(tmp_path, store):
    with pytest.raises(vd.DefinitionError, match=r"expected one of 'parquet', 'delta',.* 'jsonl'"):
        vd.Pipeline("d", source=vd.parquet("/s"), id="id").project("p", ["x"]).write(
            "out", "/t", format="csv"
        )
    store.keep_target("docs", "out", str(tmp_path), "newer")
    (found,) = gc.collect(store, gc.GcPolicy(now=4e9, keep=10, grace=10))
    assert "no publisher is registered for format 'newer'" in found.unreadable[str(tmp_path)]


def test_staged_files_are_found_below_every_partition(tmp_path):
    for folder in ("2026-01", "2026-02", "other"):
        Location(f"{tmp_path}/out/{folder}/x/{STAGING}").write("a.parquet", b"")
        Location(f"{tmp_path}/out/{folder}/x").write("published.parquet", b"")
    found = staged_parts(f"{tmp_path}/out/2026-{{partition_key}}/x", {})
    assert sorted(url.removeprefix(f"{tmp_path}/out/") for url in found) == [
        f"2026-01/x/{STAGING}/a.parquet",
        f"2026-02/x/{STAGING}/a.parquet",
    ]
