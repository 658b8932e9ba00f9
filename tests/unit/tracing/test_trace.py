"""A row followed back to its source file, and on to all that was made of it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support import prompts
from support.data import write_source
from support.in_process import compute
from support.manifests import manifest
from support.snapshots import Snapshot
from vane_dagster.cli.main import main
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store
from vane_dagster.tracing.steps import Step, Trace

DAY = "2026-01-02"
DAYS = dg.StaticPartitionsDefinition(["2026-01-01", DAY])
_DAILY: dict[str, Any] = {"partitions_def": DAYS}
STAGES = ("clean", "upper", "embedded", "joined", "words", "by_word", "by_doc", "published")


def upper(batch: pa.Table) -> pa.Table:
    return pa.table({"upper": [text.as_py().upper() for text in batch["text"]]})


class Embedder:
    """As long a vector as its text, in all three places."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"length": [self.scale * len(text.as_py()) for text in batch["upper"]]}


def split(batch: pa.Table) -> pa.Table:
    """As many words as the id's rest by four, in turned order."""
    pairs = [
        (id, word)
        for id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist())
        for word in text.split()
    ][::-1]
    return pa.table(
        {
            "id": pa.array([id for id, _ in pairs], batch["id"].type),
            "word": pa.array([word for _, word in pairs], pa.string()),
        }
    )


def only_even(batch: pa.Table) -> pa.Table:
    return batch.filter(pa.compute.equal(pa.compute.bit_wise_and(batch["id"], 1), 0))


def write_docs(folder: Path, first: int = 0, files: tuple[str, ...] = ("a", "b")) -> None:
    """30 rows a file, ids in turned order, in row groups of 10."""
    for number, name in enumerate(files):
        ids = list(range(first + 30 * number, first + 30 * number + 30))[::-1]
        table = pa.table({"id": ids, "text": [f"word{id} " * (id % 4) for id in ids]})
        write_source(folder, table, f"{name}.parquet", row_group_size=10)


def docs(
    source: Path, out: Path | None = None, where: str = "id % 5 <> 0", **kwargs
) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "docs", source=vd.parquet(str(source)), id="id", fragment_rows=10, **kwargs
    )
    clean = pipeline.project("clean", ["id", "text"], where=where)
    embedded = clean.map_batches("upper", upper, schema={"upper": "VARCHAR"}).map_batches(
        "embedded", Embedder, schema={"length": "DOUBLE"}
    )
    joined = pipeline.join("joined", clean, embedded)
    words = clean.map_batches(
        "words",
        split,
        schema={"word": "VARCHAR"},
        cardinality=vd.Children("word_id"),
    )
    pipeline.join("by_word", words, embedded, children="rows")
    pipeline.join("by_doc", embedded, words, how="left", children="list")
    if out is not None:
        joined.write("published", str(out))
    return pipeline


def clean_alone(source: Path, where: str = "id % 5 <> 0", **kwargs: Any) -> vd.Pipeline:
    """The first stage of `docs`."""
    pipeline = vd.Pipeline(
        "docs", source=vd.parquet(str(source)), id="id", fragment_rows=10, **kwargs
    )
    pipeline.project("clean", ["id", "text"], where=where)
    return pipeline


def store(folder: Path) -> Store:
    return Store(StoragePath(str(folder / "store")))


@pytest.fixture(scope="module")
def once_made(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder = tmp_path_factory.mktemp("traced") / "root"
    source, out = folder / "src" / "{partition_key}", folder / "out" / "{partition_key}"
    write_docs(folder / "src" / DAY)
    compute(docs(source, out, partitions_def=DAYS), store(folder), [DAY])
    return Snapshot(folder)


@pytest.fixture
def traced(once_made: Snapshot) -> Path:
    """A folder that no test changes."""
    return once_made.folder


@pytest.fixture
def changing(once_made: Snapshot) -> Any:
    """A folder that a test changes."""
    yield once_made.folder
    once_made.restore()


def trace(folder: Path, stage: str, id: Any, partition: str | None = DAY, **kw) -> Trace:
    return vd.trace(stage, id, partition, store=str(folder / "store"), **kw)


def by_stage(found: Trace) -> dict[str, Step]:
    assert len({step.stage for step in found.steps}) == len(found.steps)
    return {step.stage.removeprefix("docs/"): step for step in found.steps}


def row_at(step: Step) -> dict[str, Any]:
    """The row that a step points at, read from the file itself."""
    path = step.url.removeprefix("file://")
    return pq.ParquetFile(path).read().slice(step.row, 1).to_pylist()[0]


def in_force(folder: Path, stage: str, partition: str | None = DAY) -> Manifest:
    found = store(folder).in_force("docs", stage, partition)
    assert found is not None
    return found


def test_back_to_the_file_and_the_row(traced):
    found = trace(traced, "docs/published", "42")

    assert [step.stage for step in found.steps] == [
        f"docs/{s}" for s in ("source", "clean", "upper", "embedded", "joined", "published")
    ]
    steps = by_stage(found)
    for name, step in steps.items():
        assert step.keys == {"id": 42}
        assert step.partition == "2026-01-02"
        assert row_at(step)["id"] == 42, name
    source = steps["source"]
    file = traced / "src" / "2026-01-02" / "b.parquet"
    assert (source.url, source.row) == (f"file://{file}", 59 - 42)
    assert (source.size, source.version) == (file.stat().st_size, str(file.stat().st_mtime_ns))
    assert steps["published"].url == steps["joined"].url
    (published,) = steps["published"].published
    assert published.startswith(str(traced / "out" / "2026-01-02"))
    assert pq.read_table(published).slice(steps["published"].row, 1)["id"].to_pylist() == [42]
    embedded, manifest = steps["embedded"], in_force(traced, "embedded")
    assert embedded.run_id == embedded.committed_by == manifest.run_id
    assert embedded.code_version == manifest.definition
    assert embedded.model == "Embedder"
    assert embedded.pool == manifest.model["pool"]
    assert embedded.workers
    assert embedded.at <= manifest.committed_at
    assert embedded.seconds > 0
    assert steps["joined"].reads == ("clean", "embedded")
    assert not any(step.notes for step in found.steps)


def test_forward_from_the_source_finds_all_stages(traced):
    for stage in ("docs", "docs/source"):
        found = trace(traced, stage, 43, forward=True)
        counts = Counter(step.stage.removeprefix("docs/") for step in found.steps)
        assert counts == {"source": 1, **dict.fromkeys(STAGES, 1), "words": 3, "by_word": 3}
        assert found.steps[0].stage == "docs/source"
        assert (found.missing, found.omitted) == ({}, {})
        for step in found.steps:
            assert 43 in row_at(step).values()
            assert not step.notes
    found = trace(traced, "docs/words", "43-1", forward=True)
    assert [(step.stage, tuple(step.keys.values())) for step in found.steps] == [
        ("docs/words", ("43-1", 43)),
        ("docs/by_doc", (43,)),
        ("docs/by_word", ("43-1", 43)),
    ]


def test_forward_tells_who_filtered_and_what_has_no_children(traced):
    filtered = trace(traced, "docs", 45, forward=True)
    assert [step.stage for step in filtered.steps] == ["docs/source"]
    assert row_at(filtered.steps[0])["id"] == 45
    assert filtered.missing["docs/clean"] == "filtered by 'docs/clean'"
    assert filtered.missing["docs/upper"] == "no row, because docs/clean has none"
    assert set(filtered.missing) == {f"docs/{stage}" for stage in STAGES}
    assert "docs/clean      filtered by 'docs/clean'" in str(filtered)

    childless = trace(traced, "docs", 44, forward=True)
    assert childless.missing == {
        "docs/words": "filtered by 'docs/words'",
        "docs/by_word": "no row, because docs/words has none",
    }


def test_many_children_are_counted(tmp_path):
    text = " ".join(f"w{i}" for i in range(50))
    write_source(tmp_path / "src", {"id": [1, 2], "text": [text, "one"]})
    compute(docs(tmp_path / "src"), store(tmp_path))

    found = trace(tmp_path, "docs", 1, None, forward=True)

    assert sum(step.stage == "docs/words" for step in found.steps) == 20
    assert found.omitted == {"docs/words": 30, "docs/by_word": 30}
    assert "and 30 more rows" in str(found)
    back = trace(tmp_path, "docs/by_doc", 1, None)
    assert back.omitted == {"docs/words": 30}


def test_stages_that_are_older_than_those_above_or_not_materialized(changing):
    source, other = changing / "src" / "{partition_key}", "2026-01-01"
    write_docs(changing / "src" / other, first=100)
    stricter = clean_alone(source, "id % 7 <> 0", partitions_def=DAYS)
    used = in_force(changing, "clean")
    compute(stricter, store(changing), [DAY, other])

    steps = by_stage(trace(changing, "docs/upper", 42))
    assert steps["clean"].manifest.startswith("00000001-")
    assert steps["clean"].run_id == used.run_id
    assert row_at(steps["clean"])["id"] == 42
    with pytest.raises(vd.errors.TraceError, match="filtered by 'docs/clean'"):
        trace(changing, "docs/clean", 42)
    found = trace(changing, "docs", 42, forward=True)
    assert found.steps[1].stage == "docs/upper"
    assert found.steps[1].notes == ("made from an older docs/clean; materialize it again",)
    assert found.missing["docs/clean"] == "filtered by 'docs/clean'"

    found = trace(changing, "docs", 142, other, forward=True)
    assert [step.stage for step in found.steps] == ["docs/source", "docs/clean"]
    assert found.missing["docs/joined"] == f"not materialized yet in partition {other}"


def test_a_collected_manifest_and_a_lost_part_are_told(changing):
    before = by_stage(trace(changing, "docs/joined", 42))
    Path(before["upper"].url).unlink()

    lost = by_stage(trace(changing, "docs/joined", 42))
    assert lost["upper"].keys == {"id": 42}
    assert lost["upper"].run_id == before["upper"].run_id
    assert "the part is gone" in lost["upper"].notes[0]
    assert lost["clean"] == before["clean"]
    assert lost["source"] == before["source"]

    for file in (changing / "store" / "docs" / "embedded" / "manifests").rglob("*.json"):
        file.unlink()
    collected = by_stage(trace(changing, "docs/joined", 42))
    assert "was collected" in collected["embedded"].notes[0]
    assert collected["source"] == before["source"]
    assert "upper" not in collected

    Path(before["joined"].url).unlink()
    with pytest.raises(vd.errors.StoreError, match=r"'docs/joined', manifest .* is missing"):
        trace(changing, "docs/joined", 42)


def test_a_source_file_that_is_gone_or_changed(changing):
    file = changing / "src" / DAY / "b.parquet"
    before = by_stage(trace(changing, "docs/clean", 42))["source"]
    os.utime(file, (1, 1))
    touched = by_stage(trace(changing, "docs/clean", 42))["source"]
    assert touched == before

    write_docs(file.parent, first=1000, files=("a", "b"))
    changed = by_stage(trace(changing, "docs/clean", 42))["source"]
    assert (changed.url, changed.version, changed.size) == (before.url, before.version, before.size)
    assert changed.row is None
    assert "the file has changed since" in changed.notes[0]
    assert changed.notes[1] == f"the row was one of rows 10 to 20 of file://{file}"
    message = "no row with id 1042 in .*b.parquet' that the stages read. If the files ch"
    with pytest.raises(vd.errors.TraceError, match=message):
        trace(changing, "docs", 1042, forward=True)

    file.unlink()
    gone = by_stage(trace(changing, "docs/clean", 42))["source"]
    assert gone.notes[0] == "the file no longer exists"
    kept = trace(changing, "docs", 42, forward=True)
    assert {step.stage for step in kept.steps} >= {"docs/source", "docs/clean", "docs/published"}


def test_merged_files_of_a_publication(tmp_path):
    """The files that may have the row are named."""
    for first, name in enumerate(("even", "odd")):
        write_source(tmp_path / "src", {"id": range(first, 60, 2)}, f"{name}.parquet")
    pipeline = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=10
    )
    clean = pipeline.project("clean", ["id"])
    clean.write("published", str(tmp_path / "out"), target_file_bytes=1 << 20)
    compute(pipeline, store(tmp_path))

    steps = by_stage(trace(tmp_path, "docs/published", 42, None))
    assert {*map(Path, steps["published"].published)} == {*(tmp_path / "out").glob("*.parquet")}
    for name in ("published", "clean", "source"):
        assert row_at(steps[name])["id"] == 42

    for file in (tmp_path / "store" / "docs" / "clean" / "manifests").rglob("*.json"):
        file.unlink()
    with pytest.raises(vd.errors.StoreError, match="the manifest of 'clean' that it was made from"):
        trace(tmp_path, "docs/published", 42, None)


@pytest.mark.parametrize(
    ("stage", "id", "partition", "forward", "message"),
    [
        ("docs/none", 1, "2026-01-02", False, "'docs/none' was never.*'docs/by_doc'.*'docs/words'"),
        ("nodocs/clean", 1, None, False, "no pipeline 'nodocs' with results; it has 'docs'"),
        ("docs/clean", 1, "2026-01-01", False, "for partition '2026-01-01' .*1 partition: '2026"),
        ("docs/clean", 1, None, False, "is partitioned: name one with --partition,"),
        ("docs", 1, "2026-01-01", True, "never materialized for partition '2026-01-01'"),
        ("docs/clean", "x", "2026-01-02", False, "id is 'x'; its column 'id' is int64"),
        ("docs/clean", 2**63, "2026-01-02", False, "in its range"),
        ("docs/clean", 1.5, "2026-01-02", False, "expected a whole number"),
        ("docs/clean", 999, "2026-01-02", False, "has no row with id 999: its 48 rows have ids"),
        (
            "docs/published", 45, "2026-01-02", False,
            r"is in 'docs/source', row 14 of file://.*b.parquet but was filtered by 'docs/cl",
        ),
        ("docs/by_word", "44-0", "2026-01-02", False, "has no row with word_id '44-0'"),
        ("docs", 999, "2026-01-02", True, "'docs/source', partition .* no row with id 999 in"),
        ("docs/source", 42, "2026-01-02", False, "trace forward from here"),
        ("docs", 42, "2026-01-02", False, "expected pipeline and stage"),
    ],
)  # fmt: skip
def test_what_is_not_there(traced, stage, id, partition, forward, message):
    with pytest.raises(vd.errors.TraceError, match=message):
        trace(traced, stage, id, partition, forward=forward)


def test_a_pipeline_without_results_is_not_named(tmp_path):
    (tmp_path / "docs").mkdir()
    with pytest.raises(vd.errors.TraceError, match="no pipeline 'docs' with results; it has none"):
        vd.trace("docs/clean", 1, store=str(tmp_path))


def test_partitions_are_named_by_their_keys(tmp_path):
    store = Store(StoragePath(str(tmp_path)))
    for key in ("2026-01-02|eu", "2026-01-02|us"):
        store.commit(manifest(partition=key))
    with pytest.raises(
        vd.errors.TraceError, match=r"2 partitions: '2026-01-02\|us', '2026-01-02\|eu'"
    ):
        vd.trace("docs/s", 1, store=str(tmp_path))


def test_a_trace_goes_on_in_the_pipeline_whose_rows_are_the_source(changing):
    pipeline = docs(changing / "src" / "{partition_key}", partitions_def=DAYS)
    second = vd.Pipeline("words", source=pipeline["words"], id="word_id", partitions_def=DAYS)
    second.project("long", ["word_id", "word"])
    compute(second, store(changing), [DAY])

    found = trace(changing, "words/long", "42-1")

    assert [step.stage for step in found.steps] == [
        "docs/source", "docs/clean", "docs/words", "words/source", "words/long",
    ]  # fmt: skip
    assert row_at(found.steps[0])["id"] == 42
    assert row_at(found.steps[1])["id"] == 42
    for step in found.steps[2:]:
        assert row_at(step)["word_id"] == "42-1"
    assert found.steps[2].url == found.steps[3].url.removeprefix("file://")
    assert found.steps[2].keys == {"word_id": "42-1", "id": 42}

    numbered = vd.Pipeline("numbered", source=pipeline["words"], id=vd.row_id(), **_DAILY)
    numbered.project("short", ["word"], where="length(word) < 3")
    store(changing).keep_source("numbered", "parquet: asset docs/words")
    assert trace(changing, "docs", 42, forward=True).missing == {}
    first, _ = DAYS.get_partition_keys()
    write_docs(changing / "src" / first)
    compute(pipeline, store(changing), [first])
    compute(numbered, store(changing), [first])
    assert trace(changing, "docs", 42, forward=True).missing == {
        "numbered/source": f"not materialized yet in partition {DAY}"
    }
    compute(numbered, store(changing), [DAY])
    forward = trace(changing, "docs", 42, forward=True)
    made = [step for step in forward.steps if not step.stage.startswith("docs/")]
    assert [(step.stage, step.row) for step in made if "words" in step.stage] == [
        (f"words/{stage}", row) for stage in ("source", "long") for row in (1, 2)
    ]
    assert [step.keys["word_id"] for step in made if step.stage == "words/long"] == ["42-0", "42-1"]
    assert [step.row for step in made if step.stage == "numbered/source"] == [1, 2]
    assert forward.missing == {"numbered/short": "filtered by 'numbered/short'"}

    compute(
        docs(changing / "src/{partition_key}", None, "id > 0", **_DAILY), store(changing), [DAY]
    )
    older = "made from another version of docs/words; materialize it again"
    missing = trace(changing, "docs", 42, forward=True).missing
    assert missing["words/source"] == missing["numbered/source"] == older


def test_a_trace_follows_a_partition_mapping_in_both_directions(tmp_path):
    def daily(name: str, source: Any, partitions_def: Any) -> vd.Pipeline:
        made = vd.Pipeline(name, source=source, id="id", partitions_def=partitions_def)
        made.project("clean", ["id"])
        return made

    days, weeks = (
        dg.DailyPartitionsDefinition("2026-01-01"),
        dg.WeeklyPartitionsDefinition("2026-01-04"),
    )
    keys, place = (
        [f"2026-01-{day:02}" for day in range(4, 11)],
        Store(StoragePath(str(tmp_path / "store"))),
    )
    rows = [{"id": number, "day": key} for number, key in enumerate(keys)]
    raw = daily("raw", vd.table(rows, partition_column="day"), days)
    weekly = daily("weekly", raw["clean"], weeks)
    compute(raw, place, keys)
    compute(weekly, place, ["2026-01-04"])
    forward = trace(tmp_path, "raw/clean", 3, keys[3], forward=True).steps
    assert [(step.stage, step.partition) for step in forward][-2:] == [
        ("weekly/source", "2026-01-04"),
        ("weekly/clean", "2026-01-04"),
    ]
    back = trace(tmp_path, "weekly/clean", 3, "2026-01-04").steps
    assert [(step.stage, step.partition) for step in back] == [
        ("raw/source", keys[3]),
        ("raw/clean", keys[3]),
        ("weekly/source", "2026-01-04"),
        ("weekly/clean", "2026-01-04"),
    ]


def fails_on_seven(batch: pa.Table) -> pa.Table:
    if 7 in batch["id"].to_pylist():
        raise ValueError("seven is\nrefused")
    return only_even(batch)


def halved(id: int) -> list[int]:
    return [0, 1]


def two_frames(id: int) -> list[int]:
    if id == 7:
        raise ValueError("seven is refused")
    return [0, 1]


def test_a_quarantined_row_is_told_from_a_filtered_one(tmp_path):
    write_docs(tmp_path / "src")
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    even = pipeline.map_batches(
        "even",
        fails_on_seven,
        schema={"id": "BIGINT"},
        cardinality="filter",
        on_error=vd.Failures("quarantine", max_error_rate=0.5),
    )
    even.project("below", ["id"])
    every = pipeline.project("all", ["id"])
    pipeline.join("both", every, even)
    halves = every.flat_map("halves", halved, id="half", schema={"part": "INT"})
    pipeline.join("children", halves, even, children="rows")
    frames = pipeline.flat_map(
        "frames", two_frames, id="frame", schema={"part": "INT"}, on_error="quarantine"
    )
    frames.project("shown", ["part"])
    compute(pipeline, store(tmp_path))

    refused = "quarantined by 'docs/even': .*ValueError: .*seven is refused"
    for stage in ("frames", "shown"):
        made = "It would be made from id 7, which was quarantined by 'docs/frames': .*seven"
        with pytest.raises(vd.errors.TraceError, match=made):
            trace(tmp_path, f"docs/{stage}", "7-0", None)
        with pytest.raises(
            vd.errors.TraceError, match="made from id 8, as are 2 rows of the stage"
        ):
            trace(tmp_path, f"docs/{stage}", "8-2", None)
        with pytest.raises(vd.errors.TraceError, match=r"has no row with frame 'x': [^.]*$"):
            trace(tmp_path, f"docs/{stage}", "x", None)
    with pytest.raises(vd.errors.TraceError, match=f"row 22 of .* but was {refused}"):
        trace(tmp_path, "docs/below", 7, None)
    with pytest.raises(vd.errors.TraceError, match=r"row 20 of .* but was filtered by 'docs/even'"):
        trace(tmp_path, "docs/below", 9, None)
    with pytest.raises(vd.errors.TraceError, match=r"row 18 of .* but was filtered by 'docs/even'"):
        trace(tmp_path, "docs/both", 41, None)
    with pytest.raises(vd.errors.TraceError, match=f"Its id is 7. .* but was {refused}"):
        trace(tmp_path, "docs/children", "7-1", None)
    assert trace(tmp_path, "docs", 41, None, forward=True).missing == {
        "docs/even": "filtered by 'docs/even'",
        "docs/below": "no row, because docs/even has none",
        "docs/both": "no row, because docs/even has none",
        "docs/children": "no row, because docs/even has none",
    }
    found = trace(tmp_path, "docs", 7, None, forward=True)
    assert re.fullmatch(refused, found.missing["docs/even"])
    assert row_at(trace(tmp_path, "docs/below", 8, None).steps[0])["id"] == 8


def fails_on_two(word: str) -> int:
    if word == "two":
        raise ValueError("two is refused")
    return len(word)


def test_a_forward_trace_names_the_children_that_stages_lack(tmp_path):
    texts = {"id": [1, 2], "text": ["one two three four", "two"]}
    write_source(tmp_path / "src", texts)
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    words = pipeline.flat_map(
        "words", lambda text: text.split(), id="word_id", schema={"word": "VARCHAR"}
    )
    failures = vd.Failures("quarantine", max_error_rate=0.9)
    lengths = words.map("lengths", fails_on_two, schema={"n": "INT"}, on_error=failures)
    long = words.project("long", ["word"], where="length(word) > 3")
    pipeline.join("both", lengths, long)
    same = pipeline.project("same", ["text"])
    pipeline.join("by_doc", same, long, children="list")
    compute(pipeline, store(tmp_path))

    found = trace(tmp_path, "docs", 1, None, forward=True)
    assert found.missing == {
        "docs/lengths": "'1-1': quarantined by 'docs/lengths': ValueError: two is refused",
        "docs/long": "'1-0', '1-1': filtered by 'docs/long'",
        "docs/both": "'1-0': no row, because docs/long has none",
    }


def test_a_pipeline_stands_for_its_source(traced):
    pipeline = docs(traced / "src" / "{partition_key}", partitions_def=DAYS)
    found, by_name = (trace(traced, each, 42, forward=True) for each in (pipeline, "docs"))
    assert found.steps[1:] == by_name.steps[1:]
    assert (found.steps[0].values, by_name.steps[0].values) == ({"text": "word42 word42"}, {})
    with pytest.raises(vd.errors.TraceError, match="or 'docs/source' to trace forward"):
        trace(traced, pipeline, 42)


def test_a_row_has_its_values_and_a_prompt_its_question_and_answer(tmp_path):
    """Long texts are shortened; vectors, tensors and bytes are left out."""
    columns = {"vector": [[0.5]] * 4, "raw": [b"x"] * 4, "tags": [["a", "b"]] * 4}
    pipeline = prompts.docs(tmp_path, ["a fox", "a dog" * 60, "c", "d"], **columns)
    kept = pipeline.project("kept", ["text", "vector", "raw", "tags"])
    kept.prompt("asked", "Reverse: {text}", model="m", provider=prompts.Reversed, system="Do.")
    kept.prompt("made", lambda row: row["text"], model="m", provider=prompts.Reversed)
    compute(pipeline, store(tmp_path), [None])

    found = by_stage(trace(tmp_path, pipeline["asked"], 0, None))
    assert found["source"].values == {"text": "a fox", "tags": "[a, b]"}
    assert found["kept"].values == found["source"].values
    asked = found["asked"].values
    assert asked["messages"] == "system: Do. user: Reverse: {text}"
    assert asked["asked"] == "xof a :esreveR"
    assert "'prompt_tokens': 14" in asked["asked_usage"]
    made = by_stage(trace(tmp_path, pipeline["made"], 0, None))["made"].values
    assert (made["made"], "messages" in made) == ("xof a", False)
    shown = str(trace(tmp_path, "docs/asked", 1, None))
    assert f"text: {('a dog' * 60)[:79]}…; tags: [a, b]\n" in shown
    assert f"; asked: {('god a' * 60)[:79]}…; asked_usage: " in shown


def test_the_command(traced):
    run = CliRunner()
    options = ["--partition", DAY, "--store", str(traced / "store")]
    shown = run.invoke(main, ["trace", "docs/published", "--id", "42", *options])
    assert shown.output == f"{trace(traced, 'docs/published', 42)}\n"
    assert f"row 17 of file://{traced / 'src' / DAY / 'b.parquet'}" in shown.output
    assert "model Embedder" in shown.output

    made = run.invoke(main, ["trace", "docs", "--id", "42", "--forward", "--json", *options])
    forward = trace(traced, "docs", 42, forward=True).to_dict()
    assert json.loads(made.output) == json.loads(json.dumps(forward))
    wrong = run.invoke(main, ["trace", "docs/published", "--id", "45", *options])
    assert wrong.exit_code == 1
    assert wrong.output.startswith(f"Error: 'docs/published', partition '{DAY}' has no row")
