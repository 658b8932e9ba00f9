"""Failed rows as work: waivers and patches, and what is downstream of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import vane_dagster as vd
import vane_dagster.testing
from support.data import partitioned, read_stage
from support.in_process import InProcessCompute
from support.promotions import promote
from support.prompts import Reversed
from vane_dagster.errors import DefinitionError, SchemaError, StoreError, VaneError
from vane_dagster.orchestration.decide import patch, undo, waive
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store

ROWS = [{"id": n, "text": f"page {n}", "kept": n < 20} for n in range(30)]
BAD = (3, 4, 5)


class Reader:
    def __init__(self, folder: str) -> None:
        self.folder = folder.removeprefix("in ")

    def __call__(self, batch: pa.Table) -> Any:
        texts = batch["text"].to_pylist()
        with open(f"{self.folder}/called", "a") as file:
            file.write("".join(f"{text}\n" for text in texts))
        for text in texts:
            if text.startswith("bad"):
                raise ValueError(f"cannot read {text}")
        return {"words": [len(text.split()) for text in texts]}


class Edited(Reader):
    def __call__(self, batch: pa.Table) -> Any:
        return {"words": [words + 10 for words in super().__call__(batch)["words"]]}


class Lenient(Reader):
    def __call__(self, batch: pa.Table) -> Any:
        return {"words": [1 for text in batch["text"].to_pylist()]}


def pages(
    folder: Path, rows: list[dict[str, Any]], fn: Any = Reader, kind: str = "BIGINT"
) -> vd.Pipeline:
    """source -> few (20 rows) -> read -> doubled -> last: `read` may fail for 2 rows."""
    docs = vd.Pipeline("docs", source=vd.table(rows), id="id", fragment_rows=10)
    few = docs.project("few", ["id", "text"], where="kept")
    read = few.map_batches(
        "read",
        fn,
        columns=["text"],
        schema={"words": kind},
        on_error=vd.Failures(on_error="quarantine", max_error_rate=0.1),
        fn_constructor_kwargs={"folder": f"in {folder}"},
        batch_size=4,
    )
    doubled = read.map_batches("doubled", double, columns=["words"], schema={"twice": "BIGINT"})
    doubled.project("last", {"n": "twice + 1"})
    return docs


def double(batch: pa.Table) -> Any:
    return {"twice": [2 * words for words in batch["words"].to_pylist()]}


def with_bad(*bad: int) -> list[dict[str, Any]]:
    return [{**row, "text": f"bad {row['id']}"} if row["id"] in bad else row for row in ROWS]


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, str(folder / "store")
        self.given = {"store": self.store, "compute": InProcessCompute()}

    def run(self, rows: list[dict[str, Any]], fn: Any = Reader, **options: Any) -> str:
        self.pipeline = pages(self.folder, rows, fn)
        return self.error(self.pipeline, **options)

    def error(self, pipeline: vd.Pipeline, **options: Any) -> str:
        """Run a pipeline, and return the run's error; empty without one."""
        (self.folder / "called").write_text("")
        try:
            pipeline.run(**self.given, **options)
        except VaneError as error:
            return str(error)
        return ""

    @property
    def called(self) -> list[str]:
        return sorted((self.folder / "called").read_text().splitlines())

    def made(self, stage: str = "read", column: str = "words") -> dict[int, int]:
        rows = read_stage(self.folder / "store", "docs", stage)
        return dict(zip(rows["id"].to_pylist(), rows[column].to_pylist()))

    def patch(self, values: dict[int, int]) -> None:
        rows = pa.table({"id": [*values], "words": [*values.values()]})
        patch(self.pipeline["read"], None, rows, self.store)

    def in_force(self, stage: str = "read") -> Manifest:
        found = Store(StoragePath(self.store)).in_force("docs", stage, None)
        assert found is not None
        return found

    def waived(self) -> int:
        """The waived rows that the latest run counted."""
        (check,) = [each for each in self.in_force().checks if each.name == "rows"]
        found: int = check.metadata.get("waived", 0)
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_waived_rows_are_accepted_until_they_compute(runs):
    assert "blocking checks: 1 failed" in runs.run(with_bad(*BAD))
    fault = vd.quarantine("docs/read", store=runs.store).to_pylist()[0]
    assert (fault["stage"], fault["id"], fault["model"]) == ("docs/read", 3, "Reader")
    assert (fault["error"], fault["message"]) == ("ValueError", "cannot read bad 3")
    assert "raise ValueError" in fault["traceback"]
    assert (fault["attempts"], fault["run_id"]) == (1, runs.in_force().run_id)
    assert fault["worker"]
    assert "rows 0 to 10" in fault["fragment"]
    again = runs.pipeline.plan(store=runs.store, retry_quarantined=True).stages
    assert {stage.stage: stage.rows for stage in again}["read"] == len(BAD)

    (waiver,) = waive("docs/read", None, ["3", "5"], "empty pages", runs.store)

    assert (waiver.ids, waiver.reason) == ((3, 5), "empty pages")
    listed = vd.quarantine("docs/read", store=runs.store).to_pylist()
    assert [row["waived"] and row["waived"].split(" (")[0] for row in listed] == [
        "empty pages", None, "empty pages",
    ]  # fmt: skip
    assert runs.run(with_bad(*BAD)) == ""
    assert runs.waived() == 2
    assert runs.called == []
    assert runs.made("last", "n") == {n: 5 for n in range(20) if n not in BAD}
    assert runs.run(with_bad(*BAD)) == ""
    assert runs.called == []

    # They fail again with the same values: after force, and after an edit of the code.
    assert runs.run(with_bad(*BAD), force=True) == ""
    assert runs.run(with_bad(*BAD), Edited) == ""
    # Another value is another row, which is not waived, nor is one that has computed since.
    changed = [{**row, "text": "bad page"} if row["id"] == 3 else row for row in with_bad(*BAD)]
    runs.run(changed, Edited)
    assert runs.waived() == 1
    assert runs.run(with_bad(*BAD), Lenient) == ""
    assert len(runs.made()) == 20
    assert runs.run(with_bad(*BAD), Edited)
    assert runs.waived() == 0


def test_patched_rows_keep_their_outputs_until_their_values_change(runs):
    bad = with_bad(*BAD)
    runs.run(bad)

    runs.patch({3: 100, 4: 100, 7: 700})  # two rows that failed, and one that was wrong
    runs.patch({4: 400})  # the later one counts

    expected = dict.fromkeys(range(20), 2) | {3: 100, 4: 400, 7: 700}
    expected.pop(5)
    assert runs.run(bad) == ""
    assert runs.called == []
    assert runs.made() == expected
    assert runs.made("last", "n") == {id: 2 * words + 1 for id, words in expected.items()}
    parts = runs.in_force().parts
    assert [sum(p.patched for p in parts), sum(p.quarantined for p in parts)] == [3, 1]
    assert sum(part.made.run_id == runs.in_force().run_id for part in parts) == 1
    traced = str(vd.trace("docs/read", 4, store=runs.store))
    assert "patched by" in traced
    assert "copied" not in traced
    assert "patched by" not in str(vd.trace("docs/read", 8, store=runs.store))

    # Edits of the code and force keep it.
    runs.run(bad, Edited)
    assert runs.made() == {n: w if n in (3, 4, 7) else 12 for n, w in expected.items()}
    assert not {"bad 3", "bad 4", "page 7"} & {*runs.called}
    runs.run(bad, force=True)
    assert runs.made() == expected
    assert not {"bad 3", "bad 4", "page 7"} & {*runs.called}

    # Equal rows under other ids are computed, and changed values end it.
    equal = {8: "page 7", 7: "page 7", 4: "page 4"}
    runs.run([{**row, "text": equal.get(row["id"], row["text"])} for row in bad])
    assert {"page 7", "page 4"} <= {*runs.called}
    assert {id: runs.made()[id] for id in (3, 4, 7, 8)} == {3: 100, 4: 2, 7: 700, 8: 2}
    assert runs.run(bad) == ""  # the values of before, and with them the patch
    assert runs.made() == expected


def test_a_branch_undoes_what_its_fallback_has_decided(tmp_path):
    local = InProcessCompute()
    place = str(tmp_path / "store")
    production = vd.FragmentStore(root=place)
    branch = vd.FragmentStore(root=str(tmp_path / "branch"), fallback=place)
    docs = pages(tmp_path, with_bad(3, 4))
    docs.run(store=production, compute=local)
    waive("docs/read", None, ["3", "4"], "empty", production)
    patch(docs["read"], None, pa.table({"id": [7, 8], "words": [700, 800]}), production)
    docs.run(store=production, compute=local)

    made = undo("docs/read", None, ["3", "7"], branch)

    assert [each.kind for each in made] == ["unwaived", "unpatched"]
    with pytest.raises(StoreError, match="rows '3', '9' have neither a waiver nor a patch"):
        undo("docs/read", None, ["3", "8", "9"], branch)
    assert docs.plan(store=production).is_up_to_date
    assert "rows unpatched by" in str(docs.plan(store=branch))
    (tmp_path / "called").write_text("")
    docs.run(store=branch, compute=local)
    assert (tmp_path / "called").read_text() == "page 7\n"

    def decided(store: vd.FragmentStore) -> Any:
        rows = dict(zip(*vd.load("docs/read", store=store).to_pydict().values()))
        failed = vd.quarantine("docs/read", store=store).to_pylist()
        return rows[7], rows[8], {row["id"]: bool(row["waived"]) for row in failed}

    assert decided(production) == (700, 800, {3: True, 4: True})
    assert decided(branch) == (2, 800, {3: False, 4: True})
    promote(branch, production, "docs")
    assert decided(production) == (2, 800, {3: False, 4: True})
    assert docs.plan(store=production).is_up_to_date


class Same(Reader):
    """Makes what `Reader` makes, of an edited code."""

    def __call__(self, batch: pa.Table) -> Any:
        return {**super().__call__(batch)}


def test_a_row_keeps_its_patch_where_it_moves_and_is_left_out_of_comparisons(runs):
    runs.run(with_bad(3))
    runs.patch({3: 100, 7: 700})
    moved = [*reversed(with_bad(3))]
    # The run fails when it commits.
    with vd.testing.faults(vd.testing.StorageFault("*/read/manifests/*", "no_space")):
        assert runs.run(moved)
    assert "bad 3" not in runs.called
    assert runs.run(moved) == ""
    assert {id: runs.made()[id] for id in (3, 7, 8)} == {3: 100, 7: 700, 8: 2}
    assert runs.called == []

    edited = pages(runs.folder, moved, Same)
    adopted = edited["read"].adopt(**runs.given)

    assert adopted.rows == 18
    assert {"bad 3", "page 7"} <= {*runs.called}, "they are computed, and not compared"


def test_a_patch_of_other_columns_does_not_apply(runs, capsys):
    runs.run(with_bad(3))
    runs.patch({3: 100, 7: 700})
    other = pages(runs.folder, with_bad(3), Reader, "DOUBLE")

    runs.error(other)

    assert runs.made() == {n: 2.0 for n in range(20) if n != 3}
    text = "of 3, 7 does not apply, because the stage has other columns now (words double)"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"id": [1], "word": [1]}, "expected the id and all columns that the stage makes: 'id'"),
        ({"id": [1]}, "has columns 'id'"),
        ({"id": [1, 1], "words": [1, 2]}, "null or repeated"),
        ({"id": [None], "words": [1]}, "null or repeated"),
        (
            {"id": [1], "words": ["many"]},
            "column 'words' is string, and has values that",
        ),
        ({"id": [1], "words": [1.5]}, "column 'words' is double"),
        ({"id": [25], "words": [1]}, "no input row with id 25"),
        ({"id": [], "words": []}, "there is no id"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(refused, rows, message):
    with pytest.raises(StoreError, match=message):
        patch(refused.pipeline["read"], None, pa.table(rows), refused.store)


def test_other_wrong_decisions_are_refused(refused):
    one = pa.table({"id": [1], "words": [1]})
    with pytest.raises(StoreError, match="never materialized"):
        patch(refused.pipeline["read"], "2026", one, refused.store)
    with pytest.raises(StoreError, match="this is a project"):
        patch(refused.pipeline["last"], None, one, refused.store)
    with pytest.raises(StoreError, match="rows '7', 'x' are not quarantined"):
        waive("docs/read", None, ["7", "3", "x"], "empty", refused.store)
    with pytest.raises(StoreError, match="the reason is empty"):
        waive("docs/read", None, ["3"], " ", refused.store)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("refused"))
    made.run(with_bad(3))
    return made


def harm_records(folder: Path) -> None:
    """Cut the row records of both parts."""
    for path in (folder / "store/docs/read/parts").rglob("*.rows.parquet"):
        path.write_bytes(path.read_bytes()[:-40])


def test_damaged_row_records_are_written_again_without_force(runs):
    """Both of a commit that counts waivers and of a published column read them."""
    assert "blocking checks: 1 failed" in runs.run(with_bad(*BAD))
    waive("docs/read", None, ["3", "4", "5"], "empty pages", runs.store)
    harm_records(runs.folder)
    assert "it was removed. Run again" in runs.run(with_bad(*BAD))
    assert runs.run(with_bad(*BAD)) == ""
    assert runs.waived() == 3
    runs.pipeline["read"].write("published", str(runs.folder / "out"), provenance=True)
    harm_records(runs.folder)
    assert "It was removed from the stage 'docs/read'" in runs.error(runs.pipeline)
    assert runs.error(runs.pipeline) == ""
    assert len(published(runs.folder)) == 17


def published(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "out").glob("*.parquet"))
    rows = pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])
    return sorted(rows.to_pylist(), key=lambda row: row["id"])


@pytest.mark.parametrize("damaged", ["patched-*.parquet", "patched-*.rows.parquet"])
def test_a_patch_that_cannot_be_read_is_never_passed_over(damaged, runs):
    bad = with_bad(3)
    runs.run(bad)
    runs.patch({3: 100})
    (path, *_) = sorted((runs.folder / "store/docs/read/patches").rglob(damaged))
    path.write_bytes(b"PAR1")
    for _ in range(2):
        assert f"{path.name}' is damaged" in runs.run(bad)


def test_published_rows_say_how_they_were_made(runs):
    runs.pipeline = pages(runs.folder, with_bad(3))
    joined = runs.pipeline.join("joined", runs.pipeline["few"], runs.pipeline["read"])
    joined.write("published", str(runs.folder / "out"), provenance=True)
    assert runs.error(runs.pipeline) == ""
    first = runs.in_force().run_id
    ends = {"_vane_outcome": "computed", "_vane_run": first, "_vane_model": "Reader"}
    rows = published(runs.folder)
    assert [row["id"] for row in rows] == [n for n in range(20) if n != 3]
    assert [*rows[0]] == ["id", "text", "words", *ends, "_vane_code", "_vane_at"]
    assert all(row[name] == value for row in rows for name, value in ends.items())
    loaded = vd.load("docs/published", store=runs.store)
    assert loaded.column_names == ["id", "text", "words"]

    runs.patch({3: 100})
    assert runs.error(runs.pipeline) == ""

    by_id = {row["id"]: row for row in published(runs.folder)}
    assert {n: row["_vane_outcome"] for n, row in by_id.items() if n < 10} == {
        n: "patched" if n == 3 else "copied" for n in range(10)
    }
    assert by_id[3]["_vane_run"].startswith("patched-read-")
    assert {by_id[n]["_vane_run"] for n in range(20) if n != 3} == {first}
    assert by_id[10]["_vane_outcome"] == "computed"
    assert by_id[3]["_vane_at"] > by_id[4]["_vane_at"]
    assert {len(row["_vane_code"]) for row in by_id.values()} == {0, 40}


def test_provenance_is_of_one_stage_with_a_function(tmp_path):
    docs = pages(tmp_path, ROWS)
    both = docs.join("both", docs["read"], docs["doubled"])
    for stage, given in ((both, True), (both, "few"), (docs["few"], True), (docs["few"], "read")):
        with pytest.raises(DefinitionError, match=r"provenance is .*; expected the name of"):
            stage.write("out", str(tmp_path / "out"), provenance=given)
    both.write("out", str(tmp_path / "out"), provenance="doubled")
    schema = docs["out"].schema
    assert schema.field("_vane_at").type == pa.timestamp("us", "UTC")
    named = docs["doubled"].project("named", {"id": "id", "_vane_run": "twice"})
    with pytest.raises(SchemaError, match="provenance adds '_vane_run', which the rows have"):
        assert named.write("other", str(tmp_path / "other"), provenance=True).schema


def test_answers_have_their_tokens_and_cost_and_a_patch_needs_none(runs):
    rows = [{"id": f"ä/{n}", "text": text} for n, text in enumerate(["a fox", "poison", "a dog"])]
    docs = vd.Pipeline("docs", source=vd.table(rows), id="id")
    model = vd.Model("m", prices={"prompt": 1e6, "completion": 2e6})
    asked = docs.prompt("asked", "{text}", provider=Reversed, model=model, on_error="quarantine")
    asked.write("published", str(runs.folder / "out"), format="delta", provenance=True)
    assert runs.error(docs) == ""
    fixed = pa.table({"asked": ["nosiop"], "id": ["ä/1"]})

    patch(docs["asked"], None, fixed, runs.store)

    assert runs.error(docs) == ""
    made = DeltaTable(str(runs.folder / "out")).to_pyarrow_table().sort_by("id").to_pylist()
    assert [
        (row["asked"], row["_vane_outcome"], row["_vane_tokens"], row["_vane_cost"])
        for row in made
    ] == [
        ("xof a", "copied", 10, 15.0), ("nosiop", "patched", None, None),
        ("god a", "copied", 10, 15.0),
    ]  # fmt: skip


def ranked(batch: pa.Table) -> Any:
    return {"rank": list(range(batch.num_rows))}


def test_rows_without_keys_have_the_provenance_of_their_part(runs):
    docs = vd.Pipeline("docs", source=vd.table(ROWS), id="id", fragment_rows=15)
    rank = docs.map_batches("ranks", ranked, schema={"rank": "BIGINT"})
    made = rank.project("named", {"id": "id", "n": "rank"})
    made.write("published", str(runs.folder / "out"), provenance=True, format="lance")

    assert runs.error(docs) == ""
    rows = lance.dataset(str(runs.folder / "out")).to_table().to_pylist()
    assert {(row["_vane_outcome"], row["_vane_run"], row["_vane_model"]) for row in rows} == {
        ("computed", runs.in_force("ranks").run_id, "ranked")
    }
    assert len(rows) == 30
    assert "_vane_tokens" not in rows[0]
    one = pa.table({"id": [1], "rank": [1]})
    with pytest.raises(StoreError, match="no row keys, by which a decision is found again"):
        patch(docs["ranks"], None, one, runs.store)


def test_patches_of_tensors_are_converted_as_results_are(runs):
    def squares(batch: pa.Table) -> Any:
        numbers = batch["id"].to_pylist()
        return {"t": [None if n in (3, 7) else np.full((2, 2), n) for n in numbers]}

    docs = vd.Pipeline("docs", source=vd.table(ROWS), id="id")
    made = docs.map_batches(
        "made", squares, columns=["id"], schema={"t": vd.tensor("int32", (2, 2))}
    )
    assert runs.error(docs) == ""
    flat = pa.array([[3.0, 4.0, 5.0, 6.0]], pa.list_(pa.float64(), 4))
    tensors = pa.ExtensionArray.from_storage(vd.tensor("float64", (2, 2)), flat)
    for id, values in {3: tensors, 7: [[[7, 8], [9, 10]]], 9: [[9, 9, 9, 9]]}.items():
        patch(made, None, pa.table({"id": [id], "t": values}), runs.store)
    with pytest.raises(StoreError, match=r"not vd.tensor.*: lists have 3 dimensions, not 2"):
        patch(made, None, pa.table({"id": [1], "t": [[[[1]]]]}), runs.store)
    assert runs.error(docs) == ""

    rows = read_stage(runs.folder / "store", "docs", "made").sort_by("id")
    found = rows["t"].combine_chunks().storage.to_pylist()
    assert [found[n] for n in (3, 7, 9)] == [[3, 4, 5, 6], [7, 8, 9, 10], [9] * 4]


def test_partitions_have_decisions_of_their_own(tmp_path, runs):
    keys = ["2026-01-01", "ä b"]
    rows = [{**row, "day": key} for key in keys for row in with_bad(3)[:6]]
    docs = partitioned(vd.table(rows, partition_column="day"), keys)
    read = docs.map_batches(
        "read", Reader, columns=["text"], schema={"words": "BIGINT"}, on_error="quarantine",
        fn_constructor_kwargs={"folder": f"in {tmp_path}"},
    )  # fmt: skip
    read.write("published", str(tmp_path / "out"), format="delta", provenance=True)
    store = runs.store
    docs.run(**runs.given)

    waivers = waive(read, None, ["3"], "empty", store)
    patched = patch(read, keys[1], pa.table({"id": [3], "words": [30]}), store)

    assert {each.partition for each in waivers} == {*keys}
    assert patched.partition == keys[1]
    (tmp_path / "called").write_text("")
    before = DeltaTable(str(tmp_path / "out")).version()
    docs.run(**runs.given)
    assert runs.called == []
    made = DeltaTable(str(tmp_path / "out"))
    rows = made.to_pyarrow_table().to_pylist()
    assert [(row["partition_key"], row["words"]) for row in rows if row["id"] == 3] == [
        (keys[1], 30)
    ]
    assert made.version() == before + 1, "a waiver publishes nothing"
    left = vd.quarantine("docs/read", store=store).to_pylist()
    assert [(row["partition"], row["id"], row["waived"][:5]) for row in left] == [
        (keys[0], 3, "empty")
    ]
