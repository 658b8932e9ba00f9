"""Keys and files that outlive a release: versions of keys, frozen names, and a former store."""

from __future__ import annotations

import contextlib
import json
import pprint
import tarfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frozen_keys
import frozen_pipeline as frozen
import vane_dagster as vd
from support.paths import TESTS
from support.plans import double, keys, missing, plan, settle, source, triple
from vane_dagster.checks.base import Check
from vane_dagster.compute import local_head
from vane_dagster.engine.check_runner import results_for
from vane_dagster.errors import NewerFormatError
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.pipeline.specs import MapBatchesSpec
from vane_dagster.planning import key_version_2, key_versions
from vane_dagster.planning.definition import pool_identity
from vane_dagster.planning.key_versions import VERSIONS, KeyVersion, stage_definitions
from vane_dagster.planning.planner import plan_run
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.providers import registry
from vane_dagster.providers.base import Answer
from vane_dagster.storage import manifest as records
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import CheckResult, Manifest, PartInfo, PartProvenance, Published
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.publish.base import publish
from vane_dagster.storage.quarantine import read_faults
from vane_dagster.storage.reader import read
from vane_dagster.storage.store import Store, read_part_info

STORE = TESTS / "data" / "store.tar.gz"
RECOMPUTED = {"lengths", "unnamed"}
"""Of the former store: code without `version=`, and lists whose names were not keyed."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Location(str(tmp_path / "store")))


@pytest.fixture
def former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of the former release, in which this test runs."""
    with tarfile.open(STORE) as archive:
        archive.extractall(tmp_path, filter="data")
    for file in tmp_path.glob("store/**/*.json"):
        file.write_text(file.read_text().replace("@FOLDER@", str(tmp_path)))
    frozen.set_times(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(folder: Path, pipeline: vd.Pipeline | None = None, **given: Any) -> Any:
    store = Store(Location(str(folder / "store")))
    pipeline = pipeline or frozen.pipeline(folder)
    selected = given.pop("selected", tuple(pipeline.stages))
    found = plan_run(pipeline, selected, list(frozen.PARTITIONS), store, **given)
    assert not found.failed, found.failed
    return found


def manifests(folder: Path, stage: str) -> list[Path]:
    return sorted((folder / "store" / "frozen" / stage / "manifests").rglob("*.json"))


# A store of the former release


def test_the_former_store_is_up_to_date_where_its_keys_are_sound(former):
    found = planned(former)
    done = {s: [p.stages[s].done is not None for p in found.partitions] for s in found.selected}
    assert {s for s, each in done.items() if each != [True, True]} == RECOMPUTED
    assert missing(found) == dict.fromkeys(sorted(RECOMPUTED, key=list(done).index), 2)


def test_parts_of_the_former_store_are_kept_without_their_manifests(former):
    """As a run that was killed leaves them."""
    stages = [stage for stage in frozen.pipeline(former).stages if stage not in ("table", "merged")]
    for stage in stages:
        for file in manifests(former, stage):
            file.unlink()
    found = planned(former)
    assert set(missing(found)) == RECOMPUTED
    assert not any(plan.done for p in found.partitions for plan in p.stages.values())
    committed = settle(found, Store(Location(str(former / "store"))))
    assert {m.stage for m in committed} == set(found.selected)
    assert {m.info["key_version"] for m in committed} == {VERSIONS[0].number}
    again = planned(former)
    assert not missing(again)
    assert all(plan.done for p in again.partitions for plan in p.stages.values())


def test_what_the_former_release_published_is_not_published_again(former):
    def targets() -> dict[str, int]:
        files = [f for name in ("files", "merged", "table") for f in (former / name).rglob("*")]
        return {str(f): f.stat().st_mtime_ns for f in files if f.is_file()}

    before = targets()
    for stage in ("joined", "lists", "scaled"):
        for file in manifests(former, stage):
            file.unlink()
    found = planned(former)
    for stage in ("joined", "lists", "scaled", "files", "merged", "table"):
        assert all(p.stages[stage].done is None for p in found.partitions), "to be committed again"
        assert found.missing(stage) == 0
    settle(found, Store(Location(str(former / "store"))))
    assert targets() == before
    assert set(missing(planned(former))) == set(), "not RECOMPUTED, which settle has committed"


def test_an_edit_below_what_is_kept_computes_what_is_below_alone(former):
    def edited(folder: Path) -> vd.Pipeline:
        pipeline = frozen.pipeline(folder)
        spec = pipeline.stages["scaled"].spec
        udf = replace(spec.udf, constructor_kwargs={"factor": 4})
        pipeline.stages["scaled"].spec = replace(spec, udf=udf)
        return pipeline

    found = planned(former, edited(former))
    assert set(missing(found)) == RECOMPUTED | {"scaled", "merged"}
    settle(found, Store(Location(str(former / "store"))))
    assert missing(planned(former, edited(former))) == {}


def test_stages_that_are_not_selected_give_the_keys_of_their_parts(former):
    assert missing(planned(former, selected=("joined", "files"))) == {}
    for file in manifests(former, "joined"):
        file.unlink()
    assert missing(planned(former, selected=("joined", "files"))) == {}


def test_force_and_retries_start_from_the_former_store(former):
    forced = planned(former, force=True)
    assert set(missing(forced)) == set(forced.selected)
    assert {plan.generation for p in forced.partitions for plan in p.stages.values()} == {1}
    retried = planned(former, retry_quarantined=True, selected=("scaled", "merged"))
    first, second = (p.stages["scaled"] for p in retried.partitions)
    assert (first.generation, first.missing, second.done is not None) == (1, (0,), True)
    repaired = first.row_retries[0].info
    assert (repaired.rows, repaired.quarantined) == (3, 1)
    assert missing(retried) == {"scaled": 1, "merged": 1}


def test_checks_of_the_former_store_are_not_evaluated_again(former):
    """Except for the default `ErrorRate`, which allows more failed rows than it did."""
    store, pipeline = Store(Location(str(former / "store"))), frozen.pipeline(former)
    for stage in pipeline.stages:
        for partition in frozen.PARTITIONS:
            manifest = store.in_force("frozen", stage, partition)
            found = results_for(pipeline.checks(stage), manifest)
            checks = [c for c in pipeline.checks(stage) if c != vd.checks.ErrorRate()]
            stored = [check.name for check in checks if check.lasting]
            assert list(found) == stored, stage
    lists = store.in_force("frozen", "lists", "a")
    assert results_for([vd.checks.NullRate(0.2)], lists) == {}, "another threshold"


def test_rows_of_the_former_store_are_computed_again_by_the_same_code(former):
    pipeline, store = frozen.pipeline(former), Store(Location(str(former / "store")))
    for stage in pipeline:
        if stage.spec.kind == "write":
            continue
        name = stage.name
        latest = store.latest(pipeline.name, name, frozen.PARTITIONS)
        found = {k: store.read(pipeline.name, name, k, n) for k, n in latest.items()}
        sample = plan_sample(pipeline, name, found, store, rows=5, seed=1)
        assert not sample.plan.failed, sample.plan.failed
        unchanged = [each.definition in sample.definitions for each in found.values()]
        assert unchanged == [name not in RECOMPUTED] * len(found), name


def test_the_former_store_is_read(former):
    store = Store(Location(str(former / "store")))
    counts = {"clean": 8, "scaled": 7, "lengths": 8, "words": 14, "lists": 8, "pairs": 14}
    counts |= {"answers": 8, "kinds": 8, "vectors": 8, "files": 8, "table": 8, "merged": 7}
    for stage, rows in counts.items():
        found = read(store, ["frozen", stage], frozen.PARTITIONS)
        table = pa.concat_tables([pq.read_table(path) for path in found.paths])
        assert table.num_rows == rows, stage
    folder = store.parts("frozen", "scaled", "a")
    (fault,) = read_faults(folder, store.in_force("frozen", "scaled", "a")).to_pylist()
    assert (fault["id"], fault["error"], fault["message"]) == (2, "ValueError", "three")


def test_a_row_of_the_former_store_is_traced_to_its_source(former):
    found = vd.trace("frozen/files", 5, "b", store=str(former / "store"))
    message = str(found)
    assert "frozen/clean" in message
    assert "dir://source/b/rows.parquet" in message


def test_nothing_of_the_former_store_is_garbage(former):
    store = Store(Location(str(former / "store")))
    terms = GcPolicy(now=4e9, keep=0, grace=0)
    for _ in range(2):
        for stage in collect(store, terms):
            assert [stage.condemned, stage.deleted, stage.manifests] == [{}, {}, {}], stage
    assert set(missing(planned(former))) == RECOMPUTED


# Versions of keys


def newer(accepts: bool = True) -> tuple[KeyVersion, ...]:
    """A version that comes after today's, which is a former one then."""
    present, *others = VERSIONS

    def defined(pipeline: vd.Pipeline, spec: Any) -> str:
        return digest("next", present.definition(pipeline, spec))

    then = replace(present, accepts=lambda pipeline, spec: accepts)
    return (KeyVersion(present.number + 1, defined, lambda *_: True), then, *others)


def use(monkeypatch: pytest.MonkeyPatch, *found: KeyVersion) -> None:
    monkeypatch.setattr(key_versions, "VERSIONS", found)


def docs(tmp_path: Path, fn: Any = double) -> vd.Pipeline:
    """source -> clean -> doubled -> joined."""
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=4)
    cleaned = docs.project("clean", {"text": "text", "n": "n"})
    doubled = cleaned.map_batches("doubled", fn, schema={"x": "BIGINT"})
    docs.join("joined", cleaned, doubled).write("out", str(tmp_path / "out"))
    return docs


def test_a_newer_version_takes_the_former_ones_parts(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 10})
    pipeline = docs(tmp_path)
    before = settle(plan(pipeline, store), store)
    use(monkeypatch, *newer())
    found = plan(pipeline, store)
    assert all(each.done for each in found.partitions[0].stages.values())
    assert found.definitions["clean"] == stage_definitions(pipeline, pipeline["clean"].spec)[0]
    assert found.definitions["clean"] not in {m.definition for m in before}


def test_a_newer_version_that_fixed_staleness_takes_none(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 10})
    settle(plan(docs(tmp_path), store), store)
    use(monkeypatch, *newer(accepts=False))
    found = plan(docs(tmp_path), store)
    assert missing(found) == {"clean": 3, "doubled": 3, "joined": 3, "out": 3}


def test_new_files_and_edits_are_computed_under_the_newer_version(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 8})
    settle(plan(docs(tmp_path), store), store)
    former = keys(plan(docs(tmp_path, fn=double), store, force=True))
    use(monkeypatch, *newer())
    source(tmp_path, {"b.parquet": 4})
    found = plan(docs(tmp_path, fn=triple), store)
    assert missing(found) == {"clean": 1, "doubled": 3, "joined": 3, "out": 3}
    (manifest,) = [m for m in settle(found, store) if m.stage == "clean"]
    own = stage_definitions(docs(tmp_path), docs(tmp_path)["clean"].spec)
    above = [fragment.identity for fragment in manifest.fragments]
    versions_of_parts = [own[1], own[1], own[0]]
    assert [part.key for part in manifest.parts] == [
        digest(version, 0, each) for version, each in zip(versions_of_parts, above)
    ]
    again = plan(docs(tmp_path, fn=triple), store)
    assert all(each.done for each in again.partitions[0].stages.values())
    assert former["clean"]


def test_a_part_that_both_versions_have_is_the_one_in_force(tmp_path, store, monkeypatch):
    """Two releases work on one store: what is below must not change with who has come last."""
    source(tmp_path, {"a.parquet": 4})
    settle(plan(docs(tmp_path), store), store)
    in_force = store.in_force("docs", "clean", None)
    use(monkeypatch, *newer())
    own = stage_definitions(docs(tmp_path), docs(tmp_path)["clean"].spec)
    newest = digest(own[0], 0, in_force.fragments[0].identity)
    folder = store.parts("docs", "clean", None)
    write_part(in_force.schema.empty_table(), PartTarget(folder, newest, "id"))
    found = plan(docs(tmp_path, fn=triple), store)
    assert keys(found)["clean"] == (in_force.parts[0].key,)
    for file in (tmp_path / "store/docs/clean/manifests").rglob("*.json"):
        file.unlink()
    assert keys(plan(docs(tmp_path), store))["clean"] == (newest,), "none is in force"


def test_a_lost_part_is_made_again_under_the_key_that_is_in_force(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 8})
    settle(plan(docs(tmp_path), store), store)
    part = store.in_force("docs", "clean", None).parts[0]
    store.parts("docs", "clean", None).delete([part.name])
    use(monkeypatch, *newer())
    found = plan(docs(tmp_path, fn=triple), store)
    assert missing(found) == {"clean": 1, "doubled": 2, "joined": 2, "out": 2}
    assert keys(found)["clean"][0] == part.key


def test_a_generation_keeps_parts_of_former_versions(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 8})
    settle(plan(docs(tmp_path), store, force=True), store)
    settle(plan(docs(tmp_path), store, force=True, run_id="second"), store)
    use(monkeypatch, *newer())
    assert all(each.done for each in plan(docs(tmp_path), store).partitions[0].stages.values())
    found = plan(docs(tmp_path, fn=triple), store)
    assert set(missing(found)) == {"doubled", "joined", "out"}
    forced = plan(docs(tmp_path), store, force=True)
    assert set(missing(forced)) == {"clean", "doubled", "joined", "out"}


def test_accepted_parts_are_no_garbage(tmp_path, store, monkeypatch):
    source(tmp_path, {"a.parquet": 8})
    settle(plan(docs(tmp_path), store), store)
    use(monkeypatch, *newer())
    source(tmp_path, {"b.parquet": 4})
    settle(plan(docs(tmp_path), store), store)
    for _ in range(2):
        for stage in collect(store, GcPolicy(now=4e9, keep=0, grace=0)):
            assert [stage.condemned, stage.deleted] == [{}, {}], stage
    assert missing(plan(docs(tmp_path), store)) == {}


ORDERED = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}


def test_version_2_is_accepted_where_it_missed_nothing(tmp_path, monkeypatch):
    """Said in docs: which stages keep the parts of the former release."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()

    def accepted(spec_of: Any) -> bool:
        docs = vd.Pipeline("docs", source=vd.parquet("src"), id="id")
        rows = docs.project("clean", {"text": "text"})
        stage = spec_of(rows)
        return VERSIONS[1].accepts(docs, stage.spec)

    def asked(**given: Any) -> Any:
        given = {"provider": "vllm", "model": "m", **given}
        return lambda rows: rows.prompt("p", "Say {text}", **given)

    def mapped(fn: Any = double, **given: Any) -> Any:
        given = {"version": "1", **given}
        return lambda rows: rows.map_batches("m", fn, schema={"x": "BIGINT"}, **given)

    assert accepted(lambda rows: rows.project("p", {"x": "upper(text)"}, where="text > 'a'"))
    assert accepted(lambda rows: rows.write("out", "out"))
    assert accepted(asked())
    assert accepted(asked(sampling_params={"temperature": 0, "max_tokens": 5}))
    assert accepted(asked(provider="transformers", return_format=["yes", "no"]))
    assert accepted(lambda rows: rows.embed("e", "text", model="m"))
    assert accepted(lambda rows: rows.embed("e", "text", model="m", provider="vllm"))
    assert accepted(mapped(fn_kwargs={"by": 3}))
    assert not accepted(mapped(version=None)), "what code reaches"
    assert not accepted(asked(model="./weights")), "the model's files"
    assert not accepted(asked(return_format=ORDERED)), "the order of a schema's properties"
    assert not accepted(mapped(fn_kwargs={"by": [{"a": 1, "b": 2}]})), "the order of keys"
    assert not accepted(mapped(fn_args=["./weights"])), "a folder's files"
    assert not accepted(mapped(fn_args=[{1, 2}])), "what is not plain"


# Frozen names


@contextlib.contextmanager
def moved(*kinds: type) -> Iterator[None]:
    """Classes as if they had another name and were in another file."""
    before = [(kind.__module__, kind.__name__, kind.__qualname__) for kind in kinds]
    try:
        for kind in kinds:
            kind.__module__ = "vane_dagster.elsewhere"
            kind.__name__ = kind.__qualname__ = "Renamed"
        yield
    finally:
        for kind, (module, name, qualname) in zip(kinds, before):
            kind.__module__, kind.__name__, kind.__qualname__ = module, name, qualname


@pytest.mark.parametrize(
    ("name", "method"), [*((name, None) for name in registry._BUILT_IN), *registry._BY_METHOD]
)
def test_a_built_in_provider_keeps_its_name_when_it_is_moved(name, method):
    docs = vd.Pipeline("docs", source=vd.parquet("src"), id="id")
    given = {"provider": name, "model": "m"}
    ways = {
        "submit": lambda: docs.prompt("s", "Say {t}", **given),
        "embed": lambda: docs.embed("s", "t", **given),
        "classify": lambda: docs.classify("s", "t", ["a", "b"], **given),
    }
    able = [way for way in ways if registry.answers("", name, way)]
    spec = ways[method or able[0]]().spec

    def identities() -> tuple[str, ...]:
        return (*stage_definitions(docs, spec), pool_identity(docs, spec))

    before = identities()
    of_version_2 = registry.built_in_name(spec.provider) in key_version_2._PROVIDERS
    assert len(before) == 2 + of_version_2, "today's definition, version 2's, and the pool's"
    with moved(spec.provider):
        assert identities() == before


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
        "anthropic", "openai", "sentence_transformers", "transformers", "transformers_classifier",
        "vllm", "vllm_embedding",
    ]  # fmt: skip


def test_a_check_keeps_its_name_when_its_class_is_moved():
    check = vd.checks.NullRate(0.1)
    before = check.definitions
    with moved(vd.checks.NullRate):
        assert check.definitions == before


def test_each_check_has_a_name_and_all_of_its_thresholds_count():
    found = [kind for kind in vars(vd.checks).values() if isinstance(kind, type)]
    built_in = [kind for kind in found if issubclass(kind, Check) and kind is not Check]
    assert len({kind.kind for kind in built_in}) == len(built_in) >= 7
    for kind in built_in:
        attributes = {*kind.thresholds.values(), "name", "blocking", "severity"}
        assert attributes == {field.name for field in fields(kind)}, kind


def test_our_own_classes_count_by_their_public_names():
    kinds = [vd.RowErrors, vd.checks.NullRate, Answer]
    before = value_digest(kinds)
    with moved(*kinds):
        assert value_digest(kinds) == before
    assert len({value_digest(kind) for kind in kinds}) == 3


# Records on disk


def sample_manifest() -> Manifest:
    made = PartProvenance("run", ("w",), 1.0, 2.0)
    part = PartInfo("k", "d", 1, 2, 3, 4, 5, 6, 7, 8, "f", made, {"c": {"nulls": 1}})
    check = CheckResult("c", True, False, "WARN", "d", {"n": 1}, "0")
    return Manifest(
        pipeline="p", stage="s", partition="a", generation=1, plan="0", definition="1",
        schema=pa.schema([("id", pa.int64())]),
        fragments=[records.FragmentRecord("u", 0, 1, "i", 9)], parts=[part],
        files=[records.FileRecord("u", 1, "v", "c")], upstream={"t": "m"}, run_id="run",
        committed_at=1.0, info={"a": 1}, kind="write", keys=("id",), reads=("t",),
        model={"name": "n"}, lineage={"c": [["t", "c"]]}, checks=(check,), sample=({"id": "1"},),
        published=Published("u", ["f"], "delta", 3),
    )  # fmt: skip


def test_names_on_disk_are_frozen():
    """What stores hold: names may be added here, never changed or removed."""
    manifest = sample_manifest()
    record = json.loads(manifest.dumps())
    assert sorted(record) == [
        "checks", "committed_at", "definition", "files", "format", "fragments", "generation",
        "info", "keys", "kind", "lineage", "model", "partition", "parts", "pipeline", "plan",
        "published", "reads", "run_id", "sample", "schema", "stage", "upstream",
    ]  # fmt: skip
    assert record["format"] == 2
    assert record["parts"] == [
        {
            "key": "k", "digest": "d", "rows": 1, "bytes": 2, "id_min": 3, "id_max": 4,
            "rows_in": 5, "filtered": 6, "quarantined": 7, "nulled": 8, "faults": "f",
            "made": {"run_id": "run", "workers": ["w"], "at": 1.0, "seconds": 2.0},
            "measures": {"c": {"nulls": 1}},
        }
    ]  # fmt: skip
    assert record["fragments"] == [{"url": "u", "start": 0, "stop": 1, "identity": "i", "bytes": 9}]
    assert record["files"] == [{"url": "u", "size": 1, "version": "v", "content": "c"}]
    assert record["checks"] == [
        {
            "name": "c", "passed": True, "blocking": False, "severity": "WARN",
            "description": "d", "metadata": {"n": 1}, "definition": "0",
        }
    ]  # fmt: skip
    assert record["published"] == {"url": "u", "files": ["f"], "format": "delta", "version": 3}
    assert Manifest.loads(manifest.dumps()) == manifest
    footer = json.loads(records.part_footer(replace(manifest.parts[0], sample=({"id": "1"},))))
    assert footer == {"part": record["parts"][0], "sample": [{"id": "1"}]}
    assert sorted(local_head._HEAD_CODEC.names) == [
        "address", "birth", "name", "pid", "prefix", "python_version", "ray_version",
        "raylet_birth", "raylet_pid", "session_dir", "settings", "started_at", "token_path",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        PartProvenance,
        PartInfo,
        records.FragmentRecord,
        records.FileRecord,
        CheckResult,
        Published,
        Manifest,
        local_head.Head,
    ],
)
def test_each_attribute_of_a_record_has_a_name_on_disk(kind):
    """A new attribute that no table names would be lost without a word."""
    codecs = [getattr(records, n) for n in dir(records) if n.endswith("_CODEC")]
    (codec,) = [c for c in (*codecs, local_head._HEAD_CODEC) if c.kind is kind]
    # A sample stands beside the part's record, and a listing knows when a file changed.
    beside = {PartInfo: {"sample"}, records.FileRecord: {"modified"}}.get(kind, set())
    assert set(codec.names.values()) | beside == set(kind.__dataclass_fields__)


def test_fields_that_are_not_known_are_passed_over():
    record = json.loads(sample_manifest().dumps())
    record["parts"][0]["later"] = record["later"] = 1
    assert Manifest.loads(json.dumps(record).encode()) == sample_manifest()


# Newer formats


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


REFUSED = r"{name}.*has format 4, and this release .* knows formats up to {known}.*Upgrade"


@pytest.fixture
def one_newer(former: Path) -> Path:
    """A store with a manifest of a newer format, of the stage "joined" in partition "a"."""
    (file,) = [f for f in manifests(former, "joined") if f.parent.name == "a"]
    rewrite(file, format=4)
    return file


def refused(name: str, known: int = 3) -> Any:
    return pytest.raises(NewerFormatError, match=REFUSED.format(name=name, known=known))


def test_plans_refuse_a_newer_manifest(former, one_newer):
    store = Store(Location(str(former / "store")))
    (other,) = [f for f in manifests(former, "answers") if f.parent.name == "a"]
    other.unlink()  # so that what is below is planned
    found = plan_run(frozen.pipeline(former), ("joined", "answers"), ["a", "b"], store)
    assert "b" not in found.failed
    assert isinstance(found.failed["a"], NewerFormatError)
    assert one_newer.name in str(found.failed["a"])


def test_reading_and_tracing_refuse_a_newer_manifest(former, one_newer):
    with refused(one_newer.name):
        vd.load("frozen/joined", "a", store=str(former / "store"))
    with refused(one_newer.name):
        vd.trace("frozen/joined", 1, "a", store=str(former / "store"))


def test_nothing_is_deleted_where_there_is_a_newer_manifest(former, one_newer):
    store = Store(Location(str(former / "store")))
    garbage = former / "store" / "aaa" / "stage" / "parts" / "_"
    garbage.mkdir(parents=True)
    (garbage / f"{'0' * 40}-{'0' * 16}.parquet").write_bytes(b"x")
    before = snapshot(former)
    with refused(one_newer.name):
        list(collect(store, GcPolicy(now=4e9, keep=0, grace=0)))
    assert snapshot(former) == before


def test_publishing_refuses_a_newer_announcement(former):
    store = Store(Location(str(former / "store")))
    manifest = store.in_force("frozen", "files", "a")
    store.announce(manifest)
    (announced,) = [f for f in manifests(former, "files") if f.name.startswith("publishing-")]
    rewrite(announced, format=4)
    before = snapshot(former)
    publisher = frozen.pipeline(former)["files"].spec.publisher("a")
    with refused(announced.name):
        publish(store, publisher, manifest)
    assert snapshot(former) == before


def test_a_newer_footer_is_no_damage(former, monkeypatch):
    """A damaged part is removed and made again; one of a newer release is not."""
    store = Store(Location(str(former / "store")))
    folder = store.parts("frozen", "clean", "a")
    (name,) = folder.names()
    assert read_part_info(folder, name).rows == 4
    table = pq.read_table(folder.file(name))
    stored = json.loads(table.schema.metadata[b"vane"])
    metadata = json.dumps({**stored, "format": 4})
    pq.write_table(table.replace_schema_metadata({"vane": metadata}), folder.file(name))
    with refused(name, 1):
        read_part_info(folder, name)


@pytest.mark.parametrize("name", ["fragments.json", "files/target.json", "clean/condemned.json"])
def test_newer_settings_are_refused(former, name):
    store = Store(Location(str(former / "store")))
    file = former / "store" / "frozen" / name
    file.write_text(json.dumps({"format": 4}))
    before = snapshot(former)
    with refused(file.name, 1):
        if name == "fragments.json":
            planned(former)
        else:
            list(collect(store, GcPolicy(now=4e9, keep=0, grace=0)))
    assert snapshot(former) == before


# Keys, as they are


def test_keys_of_every_kind_of_stage_are_pinned(former):
    """Of a pipeline with no code that is keyed by what it says; see the next test for that."""
    pipeline = frozen.pipeline(former)
    store = Store(Location(str(former / "empty")))
    found = plan_run(pipeline, tuple(pipeline.stages), ["a"], store)
    (partition,) = found.partitions
    maps = [s.spec for s in pipeline if isinstance(s.spec, MapBatchesSpec)]
    pinned = {
        "fragments": [fragment.identity for fragment in partition.fragments],
        "keys": {s: plan.keys[0] for s, plan in partition.stages.items() if s != "lengths"},
        "plans": {s: plan.digest for s, plan in partition.stages.items() if s != "lengths"},
        "pools": {m.name: pool_identity(pipeline, m).digest for m in maps if m.name != "lengths"},
    }
    assert pinned == frozen_keys.STAGES, instructions(pinned)


def test_definitions_of_checks_are_pinned():
    expected = {"id": [1], "y": [2.0]}
    found = {
        check.kind: check.definition
        for check in [
            vd.checks.IdsComplete(), vd.checks.ErrorRate(0.02), vd.checks.NullRate({"a": 0.1}),
            vd.checks.Vectors(dimension=3), vd.checks.Text(columns=["t"]), vd.checks.Drift("n"),
            vd.checks.Golden(expected),
        ]
    }  # fmt: skip
    assert found == frozen_keys.CHECKS, instructions(found)


def test_identities_of_code_are_pinned():
    """The only literals that hang on how code is read."""
    found = {
        "function": code_identity(frozen.length).digest,
        "class": code_identity(frozen.Scale).digest,
        "version": code_identity(frozen.Scale, version="1").digest,
        "value": value_digest({"a": [1, 2.5, None, True, b"x"], "b": (vd.RowErrors,)}),
    }
    assert found == frozen_keys.CODE, instructions(found)


def test_names_of_files_are_pinned():
    name = records.ManifestName(7, 1, "0" * 32, "1" * 16)
    assert str(name) == f"00000007-g1-{'0' * 32}-{'1' * 16}.json"
    assert records.part_name("2" * 40, "3" * 16) == f"{'2' * 40}-{'3' * 16}.parquet"
    part = PartInfo("2" * 40, "3" * 16, 1, 1)
    assert records.content_digest([part]) == "90c6192b04cfbdcd"
    store = Store(Location("/store"))
    assert store.parts("p", "s", "a/b").path == "/store/p/s/parts/a-b~c14cddc033f64b9dea80"
    assert store.manifests("p", "s", None).path == "/store/p/s/manifests/~unpartitioned"


def instructions(found: Any) -> str:
    return (
        "Keys have changed, so that every store would be computed anew. If that is not meant, undo "
        "it. If it is, raise the version (planning/key_versions.py says how; for checks it is in "
        "checks/base.py), keep the former one, so that its parts are taken where they are "
        f"sound, and put this into frozen_keys.py:\n{pprint.pformat(found, width=100)}"
    )
