"""Rows that are computed again for a check: of every kind of stage, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute, compute
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.orchestration.reproducible import evaluate_alone
from vane_dagster.orchestration.run import RunContext
from vane_dagster.storage.manifest import CheckResult


class Checked:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = vd.FragmentStore(root=str(folder / "store"))

    def source(self, rows: int) -> None:
        texts = [f"{'x' * (i % 7)}{i}" for i in range(rows)]
        table = pa.table({"id": pa.array(range(rows), pa.int64()), "text": texts})
        write_source(self.folder / "source", table)

    def run(self, docs: vd.Pipeline) -> None:
        compute(docs, self.store.open())

    def results(
        self, docs: vd.Pipeline, partitions: tuple[str, ...] = ()
    ) -> dict[str, CheckResult]:
        found: dict[str, CheckResult] = {}
        given: Any = SimpleNamespace(
            selected_asset_keys=(),
            selected_asset_check_keys=[
                dg.AssetCheckKey(stage.key, "reproducible") for stage in docs
            ],
            has_partition_key=False,
            has_partition_key_range=False,
            log=SimpleNamespace(info=str, warning=str),
        )
        config: Any = SimpleNamespace(reproduce_partitions=partitions)
        log: Any = SimpleNamespace(
            blocked=(),
            record=lambda stage, key, results: found.update({stage: results[0]}),
            flush=lambda: None,
        )
        store = self.store.open()
        context = RunContext(store, "run", CheckRunner(docs, store))
        evaluate_alone(given, log, docs, context, InProcessCompute(), config)
        return found

    def result(self, docs: vd.Pipeline) -> CheckResult:
        (found,) = self.results(docs).values()
        return found


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    return Checked(tmp_path)


AGAIN = vd.Asset(checks=[vd.checks.Reproducible()])


def pipeline(tmp_path, id: str = "id", **kwargs) -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id=id, **kwargs)


def length_of_most(batch: pa.Table) -> dict[str, Any]:
    """Fails for every fifth row."""
    if bad := [i for i in batch["id"].to_pylist() if i % 5 == 0]:
        raise ValueError(f"cannot do {bad}")
    return {"n": [len(text) for text in batch["text"].to_pylist()]}


def letters(batch: pa.Table) -> dict[str, Any]:
    ids = [i for i in batch["id"].to_pylist() for _ in range(i % 4)]
    places = [n for i in batch["id"].to_pylist() for n in range(i % 4)]
    return {
        "id": ids,
        "letter_id": [f"{i}-{n}" for i, n in zip(ids, places)],
        "letter": ["abc"[n] for n in places],
    }


def test_every_kind_of_stage_is_computed_again_from_what_it_was_made_from(tmp_path, checked):
    checked.source(30)
    docs = pipeline(tmp_path)
    given = {"asset": vd.Asset(checks=[vd.checks.Reproducible(rows=15)])}
    columns = {"text": "text", "twice": "id * 2"}
    long = docs.project("long", columns, where="id % 3 < 2", **given)
    for name, on_error in {"nulls": "null", "lengths": "quarantine"}.items():
        failures = vd.Failures(on_error, max_error_rate=0.5)
        options = {"schema": {"n": "BIGINT"}, "batch_size": 4, "on_error": failures, **given}
        lengths = long.map_batches(name, length_of_most, **options)
    words = lengths.map_batches(
        "words", letters, columns=["n"], schema={"letter": "VARCHAR"},
        cardinality=vd.Children("letter_id"), **given,
    )  # fmt: skip
    words.map_batches("upper", upper, schema={"upper": "VARCHAR"}, **given)
    docs.join("rows", lengths, words, children="rows", **given)
    docs.join("lists", long, words, how="left", children="list", **given)
    docs.join("carried", lengths, source_columns=["text"], columns={"lengths": ["n"]}, **given)
    checked.run(docs)
    found = checked.results(docs)
    assert set(found) == {stage.name for stage in docs}
    assert all(each.passed for each in found.values()), found
    rows = [each.metadata["rows"] for each in found.values()]
    assert all(0 < n <= 15 for n in rows), rows


def upper(batch: pa.Table) -> dict[str, Any]:
    return {"upper": [letter.upper() for letter in batch["letter"].to_pylist()]}


class Edited:
    """Fails for the last row once a file is there, which no key can know."""

    def __init__(self, path: str) -> None:
        self.folder = path.rpartition("/")[0]

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        if Path(self.folder, "fails").exists() and batch["id"].to_pylist()[-1] == 63:
            raise ValueError("the last row")
        return {"label": [text[:1] for text in batch["text"].to_pylist()]}


def test_a_sample_that_fails_leaves_no_part_and_a_changed_source_is_not_compared(tmp_path, checked):
    checked.source(64)
    docs = pipeline(tmp_path, fragment_rows=32)
    docs.map_batches(
        "labels",
        Edited,
        fn_constructor_args=[f"{tmp_path}/there"],
        schema={"label": "VARCHAR"},
        asset=vd.Asset(checks=[vd.checks.Reproducible(rows=100)]),
    ).project("texts", {"label": "label"}, asset=AGAIN)
    with pytest.raises(vd.errors.StoreError, match="never materialized"):
        checked.results(docs)
    checked.run(docs)
    parts = set((tmp_path / "store").rglob("*.parquet"))
    (tmp_path / "fails").touch()
    found = checked.results(docs)["labels"]
    assert not found.passed
    assert "could not be computed again and compared" in found.description
    assert "the last row" in found.description
    assert set((tmp_path / "store").rglob("*.parquet")) == parts

    checked.source(65)  # other rows stand at the same places
    found = checked.results(docs)
    source, below = found["labels"], found["texts"]
    assert (source.passed, source.severity) == (False, "WARN")
    assert "source files changed after the run" in source.description
    assert (below.passed, below.metadata["rows"]) == (True, 20), "of the part that it was made from"


def test_a_stored_part_that_is_gone_is_told(tmp_path, checked):
    checked.source(1)
    docs = pipeline(tmp_path)
    docs.project("texts", {"text": "text"}, asset=AGAIN)
    checked.run(docs)
    assert checked.result(docs).description == "1 row computed again; all match"

    (part,) = (tmp_path / "store").rglob("*.parquet")
    part.unlink()
    found = checked.result(docs)
    assert not found.passed
    assert "could not be computed again and compared" in found.description
    assert "is missing" in found.metadata["error"]
    with pytest.raises(vd.errors.StoreError, match="partition 'a' was never materialized"):
        checked.results(docs, ("a",))

    by_text = pipeline(tmp_path, "text")
    by_text.project("texts", {"n": "1"}, asset=AGAIN)
    found = checked.result(by_text)
    assert not found.passed
    assert "identified by 'id' in the store but by 'text' now" in found.description
