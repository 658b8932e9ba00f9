"""Names that outlive a release: of providers and checks, of records and files, and formats."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.plans import docs, plan, settle, source
from vane_dagster.compute import local_head
from vane_dagster.errors import NewerFormatError
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.providers import registry
from vane_dagster.providers.base import Answer
from vane_dagster.storage import manifest as records
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import (
    CheckResult,
    Component,
    Manifest,
    PartInfo,
    PartProvenance,
    Published,
)
from vane_dagster.storage.store import Store, read_part_info

# Frozen names


def test_a_built_in_provider_keeps_its_name_when_it_is_moved(monkeypatch):
    docs = vd.Pipeline("docs", source=vd.parquet("src"), id="id")
    spec = docs.prompt("s", "Say {t}", provider="openai", model="m").spec
    before = stage_definition(docs, spec), pool_identity(docs, spec)
    monkeypatch.setattr(spec.provider, "__module__", "vane_dagster.elsewhere")
    assert (stage_definition(docs, spec), pool_identity(docs, spec)) == before


def test_a_users_provider_is_none_of_ours():
    class Provider:
        async def submit(self, request: Any) -> Any:
            raise NotImplementedError

    Provider.__module__, Provider.__qualname__ = "vane_dagster.providers.vllm", "VllmProvider"
    assert registry.built_in_name(Provider) is None


def test_each_built_in_provider_has_a_frozen_name():
    places = {*registry._BUILT_IN.values(), *registry._BY_METHOD.values()}
    assert set(registry._FROZEN) == places
    assert sorted(registry._FROZEN.values()) == [
        "anthropic", "openai", "sentence_transformers", "transformers", "vllm", "vllm_embedding",
    ]  # fmt: skip


def test_our_own_classes_count_by_their_names_so_that_they_may_move(monkeypatch):
    kinds = [vd.errors.RowErrors, vd.checks.NullRate, Answer]
    before = value_digest(kinds)
    elsewhere = SimpleNamespace(**{kind.__name__: kind for kind in kinds})
    monkeypatch.setitem(sys.modules, "vane_dagster.elsewhere", elsewhere)
    for kind in kinds:
        monkeypatch.setattr(kind, "__module__", "vane_dagster.elsewhere")
    assert value_digest(kinds) == before
    assert len({value_digest(kind) for kind in kinds}) == 3


# Records on disk


def sample_manifest() -> Manifest:
    made = PartProvenance("run", ("w",), 1.0, 2.0)
    many = (records.FileSpan("u", 0, 2), records.FileSpan("v", 0, 3, "d"))
    part = PartInfo("k", "d", 1, 2, 3, 4, 5, 6, 7, 8, "f", made, {"c": {"nulls": 1}})
    check = CheckResult("c", True, False, "WARN", "d", {"n": 1}, "0")
    return Manifest(
        pipeline="p", stage="s", partition="a", generation="1", plan="0", definition="1",
        schema=pa.schema([("id", pa.int64())]),
        fragments=(
            records.FragmentRecord("u", 0, 1, "i", 9),
            records.FragmentRecord("u", 0, 5, "j", 9, many),
        ),
        parts=(part,), files=(records.FileRecord("u", 1, "v", "c"),), upstream={"t": "m"},
        run_id="run", committed_at=1.0, info={"a": 1}, kind="write", keys=("id",), reads=("t",),
        model={"name": "n"}, lineage={"c": [["t", "c"]]}, checks=(check,), sample=({"id": "1"},),
        published=Published("u", ("f",), "delta", 3),
        components=(Component("code", "f", "9"),), figures={"seconds": 1.5},
        source="jsonl", id_rule='{"row": true}', row_definition="2",
    )  # fmt: skip


def test_names_on_disk_are_frozen():
    """What stores hold: names may be added here, never changed or removed."""
    manifest = sample_manifest()
    record = json.loads(manifest.dumps())
    assert sorted(record) == [
        "checks", "committed_at", "components", "definition", "figures", "files", "format",
        "fragments", "generation", "id_rule", "info", "keys", "kind", "lineage", "model",
        "partition", "parts", "pipeline", "plan", "published", "reads", "row_definition", "run_id",
        "sample", "schema", "source", "stage", "upstream",
    ]  # fmt: skip
    assert record["format"] == 1
    assert record["parts"] == [
        {
            "key": "k", "digest": "d", "rows": 1, "bytes": 2, "id_min": 3, "id_max": 4,
            "rows_in": 5, "filtered": 6, "quarantined": 7, "nulled": 8, "faults": "f",
            "made": {"run_id": "run", "workers": ["w"], "at": 1.0, "seconds": 2.0},
            "measures": {"c": {"nulls": 1}},
        }
    ]  # fmt: skip
    assert record["fragments"] == [
        {"url": "u", "start": 0, "stop": 1, "identity": "i", "bytes": 9},
        {
            "url": "u", "start": 0, "stop": 5, "identity": "j", "bytes": 9,
            "files": [
                {"url": "u", "start": 0, "stop": 2},
                {"url": "v", "start": 0, "stop": 3, "detail": "d"},
            ],
        },
    ]  # fmt: skip
    assert record["files"] == [{"url": "u", "size": 1, "version": "v", "content": "c"}]
    assert record["checks"] == [
        {
            "name": "c", "passed": True, "blocking": False, "severity": "WARN",
            "description": "d", "metadata": {"n": 1}, "definition": "0",
        }
    ]  # fmt: skip
    assert record["figures"] == {"seconds": 1.5}
    assert record["components"] == [["code", "f", "9"]]
    assert record["published"] == {"url": "u", "files": ["f"], "format": "delta", "version": 3}
    assert records.MANIFEST.load(record) == manifest
    footer = json.loads(records.part_footer(replace(manifest.parts[0], sample=({"id": "1"},))))
    assert footer == {"part": record["parts"][0], "sample": [{"id": "1"}]}
    assert sorted(each.name for each in local_head._HEAD_CODEC._fields) == [
        "address", "name", "pid", "prefix", "session_dir", "settings", "started_at",
        "token_path",
    ]  # fmt: skip


# Newer formats


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    source(tmp_path, {"a.parquet": 3})
    store = Store(StoragePath(str(tmp_path / "store")))
    settle(plan(docs(tmp_path, where="n >= 0"), store), store)
    return tmp_path


def manifests(folder: Path, stage: str) -> list[Path]:
    return sorted((folder / "store" / "docs" / stage / "manifests").rglob("*.json"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


REFUSED = r"{name}.*has format 4, but this release .* supports formats up to 1.*Upgrade"


@pytest.fixture
def one_newer(written: Path) -> Path:
    (file,) = manifests(written, "joined")
    rewrite(file, format=4)
    return file


def refused(name: str) -> Any:
    return pytest.raises(NewerFormatError, match=REFUSED.format(name=name))


def test_plans_reading_and_tracing_refuse_a_newer_manifest(written, one_newer):
    store = Store(StoragePath(str(written / "store")))
    with refused(one_newer.name):
        vd.load("docs/joined", store=store.root.url)
    with refused(one_newer.name):
        vd.trace("docs/joined", "a.parquet-1", store=store.root.url)
    (other,) = manifests(written, "out")
    other.unlink()  # so that what is below is planned
    found = plan(docs(written, where="n >= 0"), store)
    assert isinstance(found.failed[None], NewerFormatError)
    assert one_newer.name in str(found.failed[None])


def test_nothing_is_deleted_where_there_is_a_newer_manifest(written, one_newer):
    store = Store(StoragePath(str(written / "store")))
    garbage = written / "store" / "aaa" / "stage" / "parts" / "_"
    garbage.mkdir(parents=True)
    (garbage / f"{'0' * 40}-{'0' * 16}.parquet").write_bytes(b"x")
    before = snapshot(written)
    with refused(one_newer.name):
        list(collect(store, GcPolicy(now=4e9, keep=0, grace=0)))
    assert snapshot(written) == before


def test_a_newer_footer_is_no_damage(written, monkeypatch):
    """A damaged part is removed and made again; one of a newer release is not."""
    store = Store(StoragePath(str(written / "store")))
    folder = store.parts("docs", "clean", None)
    (name,) = folder.names()
    assert read_part_info(folder, name).rows == 0
    table = pq.read_table(folder.file(name))
    stored = json.loads(table.schema.metadata[b"vane"])
    metadata = json.dumps({**stored, "format": 4})
    pq.write_table(table.replace_schema_metadata({"vane": metadata}), folder.file(name))
    with refused(name):
        read_part_info(folder, name)


def test_names_of_files_are_pinned():
    name = records.ManifestName(7, 1, "0" * 32, "1" * 16)
    assert str(name) == f"00000007-g1-{'0' * 32}-{'1' * 16}.json"
    assert records.part_name("2" * 40, "3" * 16) == f"{'2' * 40}-{'3' * 16}.parquet"
    part = PartInfo("2" * 40, "3" * 16, 1, 1)
    assert records.content_digest([part]) == "90c6192b04cfbdcd"
    store = Store(StoragePath("/store"))
    assert store.parts("p", "s", "a/b").path == "/store/p/s/parts/a-b~c14cddc033f64b9dea80"
    assert store.manifests("p", "s", None).path == "/store/p/s/manifests/~unpartitioned"
