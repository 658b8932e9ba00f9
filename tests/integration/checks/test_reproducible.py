"""The check that computes stored rows again: what it samples, compares and tells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import failure
from support.warm_workers import ForkedLocal

# Through Dagster

DAYS = dg.StaticPartitionsDefinition(["a", "b"])


class Stars:
    """A model that reads a file whenever it is called, which no key can know."""

    def __init__(self, path: str) -> None:
        self.folder = path.rpartition("/")[0]

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        said = Path(self.folder, "factor.txt").read_text()
        if said == "fails" and batch["id"].to_pylist()[-1] == 63:
            raise ValueError("the last row")
        factor = 2.0 if said == "fails" else float(said)
        texts = batch["text"].to_pylist()
        return {"stars": [len(text) * factor for text in texts], "label": [t[:1] for t in texts]}


class Checked:
    """A pipeline in one instance, over one store."""

    def __init__(self, tmp_path, compute, instance) -> None:
        self.folder, self.compute, self.instance = tmp_path, compute, instance
        self.store = vd.FragmentStore(root=str(tmp_path / "store"))

    def source(self, rows: int, key: str = "") -> None:
        texts = [f"{'x' * (i % 7)}{i}" for i in range(rows)]
        table = pa.table({"id": pa.array(range(rows), pa.int64()), "text": texts})
        write_source(self.folder / "source" / key, table)

    def run(self, docs, checks_alone: bool = True, partition=None, config=None, **kwargs):
        assets = docs.build_assets()
        selection = None
        if checks_alone:
            selection = dg.AssetSelection.checks(
                *(k for k in assets.check_keys if k.name.startswith("repro"))
            )
        config = {"ops": {"docs_pipeline": {"config": config or {}}}}
        return dg.materialize(
            [assets],
            selection=selection,
            partition_key=partition,
            run_config=config,
            instance=self.instance,
            resources={"compute": self.compute, "store": self.store},
            **kwargs,
        )

    def evaluation(self, docs, *args, **kwargs) -> dg.AssetCheckEvaluation:
        (found,) = self.evaluations(docs, *args, **kwargs)
        return found

    def evaluations(self, docs, *args, **kwargs) -> list[dg.AssetCheckEvaluation]:
        result = self.run(docs, *args, **kwargs)
        kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
        events = self.instance.all_logs(result.run_id, of_type=kind)
        return [event.dagster_event.asset_check_evaluation_data for event in events]


@pytest.fixture
def checked(tmp_path, local) -> Iterator[Checked]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Checked(tmp_path, local, instance)


def table(evaluation: dg.AssetCheckEvaluation) -> list[dict[str, Any]]:
    return [dict(record.data) for record in evaluation.metadata["differences"].records]


def value(evaluation: dg.AssetCheckEvaluation, name: str) -> Any:
    return evaluation.metadata[name].value


AGAIN = vd.Asset(checks=[vd.checks.Reproducible()])


def pipeline(tmp_path, id: str = "id", **kwargs) -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id=id, **kwargs)


def stars_pipeline(tmp_path, rows: int = 10) -> vd.Pipeline:
    docs = pipeline(tmp_path, fragment_rows=32)
    docs.map_batches(
        "stars",
        Stars,
        fn_constructor_args=[f"{tmp_path}/data/there"],
        schema={"stars": "DOUBLE", "label": "VARCHAR"},
        concurrency=1,
        asset=vd.Asset(checks=[vd.checks.Reproducible(rows=rows)]),
    )
    return docs


def factor(tmp_path, text: str) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "factor.txt").write_text(text)


def test_a_file_that_was_edited_is_found_and_the_rows_are_named(tmp_path, checked):
    factor(tmp_path, "2.0")
    checked.source(200)
    checked.compute = ForkedLocal(num_cpus=2)  # models stay warm
    docs = stars_pipeline(tmp_path)
    assert checked.run(docs, checks_alone=False).success
    files = sorted((tmp_path / "store").rglob("*"))
    found = checked.evaluation(docs, config={"reproduce_seed": 7})
    assert found.passed, found.description
    assert "10 rows computed again; all match" in found.description
    assert (value(found, "rows"), value(found, "differing"), value(found, "seed")) == (10, 0, "7")
    assert (value(found, "loads"), value(found, "warm")) == (0, 1)
    assert value(found, "code_changed") is False

    factor(tmp_path, "3.0")
    assert checked.run(docs, checks_alone=False).success, "the key knows nothing of it"
    found = checked.evaluation(docs, config={"reproduce_seed": 7})
    assert not found.passed
    assert "10 of 10 rows differ from the stored rows" in found.description
    assert found.severity == dg.AssetCheckSeverity.ERROR
    rows = table(found)
    assert len(rows) == 10
    assert {row["column"] for row in rows} == {"stars"}
    for row in rows:
        length = len(f"{'x' * (int(row['id']) % 7)}{row['id']}")
        assert (row["stored"], row["computed"]) == (str(length * 2.0), str(length * 3.0))
    assert sorted((tmp_path / "store").rglob("*")) == files, "nothing is left behind or committed"


def length_of_most(batch: pa.Table) -> dict[str, Any]:
    """Fails for every fifth row."""
    if bad := [i for i in batch["id"].to_pylist() if i % 5 == 0]:
        raise ValueError(f"cannot do {bad}")
    return {"n": [len(text) for text in batch["text"].to_pylist()]}


def letters(batch: pa.Table) -> dict[str, Any]:
    """As many rows as an id says, perhaps none."""
    ids = [i for i in batch["id"].to_pylist() for _ in range(i % 4)]
    places = [n for i in batch["id"].to_pylist() for n in range(i % 4)]
    return {
        "id": ids,
        "letter_id": [f"{i}-{n}" for i, n in zip(ids, places)],
        "letter": ["abc"[n] for n in places],
    }


def test_every_kind_of_stage_is_computed_again_from_what_it_was_made_from(tmp_path, checked):
    checked.source(90)
    docs = pipeline(tmp_path, fragment_rows=16)
    given = {"asset": vd.Asset(checks=[vd.checks.Reproducible(rows=30)])}
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
    assert checked.run(docs, checks_alone=False).success
    found = checked.evaluations(docs)
    descriptions = {each.asset_key.path[-1]: each.description for each in found}
    assert set(descriptions) == {stage.name for stage in docs}
    assert all(each.passed for each in found), descriptions
    rows = [value(each, "rows") for each in found]
    assert all(0 < n <= 30 for n in rows), rows


def upper(batch: pa.Table) -> dict[str, Any]:
    return {"upper": [letter.upper() for letter in batch["letter"].to_pylist()]}


def guess(batch: pa.Table) -> dict[str, Any]:
    return {"n": [random.random() for _ in range(len(batch))]}


def test_a_function_that_gives_other_results_each_time_is_found(tmp_path, checked):
    for key in "ab":
        checked.source(10, key)
    source = vd.parquet(str(tmp_path / "source" / "{partition_key}"))
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=DAYS)
    docs.map_batches(
        "n", guess, schema={"n": "DOUBLE"}, asset=vd.Asset(checks=[vd.checks.Reproducible(5)])
    )
    for key in "ab":
        run = checked.run(docs, checks_alone=False, partition=key)
        assert run.success
        names = [each.check_name for each in run.get_asset_check_evaluations()]
        assert "reproducible" not in names, "it is executed alone"
    found = checked.evaluation(docs, config={"reproduce_partitions": ["b"]})
    assert not found.passed
    assert found.partition == "b"
    assert len(table(found)) == 5
    both = checked.evaluations(docs)
    assert sorted(each.partition for each in both) == ["a", "b"]
    only = {"reproduce_rows": 8, "reproduce_partitions": ["a"]}
    rows = checked.evaluation(docs, config=only)
    assert value(rows, "rows") == 8


def test_a_sample_that_fails_leaves_no_part_and_a_changed_source_is_not_compared(tmp_path, checked):
    factor(tmp_path, "2.0")
    checked.source(64)
    docs = stars_pipeline(tmp_path, rows=100)
    docs["stars"].project("texts", {"label": "label"}, asset=AGAIN)
    assert "never materialized" in failure(checked.run(docs, raise_on_error=False))
    assert checked.run(docs, checks_alone=False).success
    parts = set((tmp_path / "store").rglob("*.parquet"))
    factor(tmp_path, "fails")
    found = next(e for e in checked.evaluations(docs) if e.asset_key.path[-1] == "stars")
    assert not found.passed
    assert "could not be computed again" in found.description
    assert "the last row" in found.description
    assert set((tmp_path / "store").rglob("*.parquet")) == parts
    checked.source(65)  # other rows stand at the same places
    source, below = checked.evaluations(docs)
    assert not source.passed
    assert source.severity == dg.AssetCheckSeverity.WARN
    assert "source files of 2 of 2 fragments have changed since" in source.description
    assert value(source, "rows") == 0
    assert below.passed, "it reads the part that it was made from"
    assert value(below, "rows") == 20


def test_a_stored_part_that_is_gone_is_told(tmp_path, checked):
    checked.source(1)
    docs = pipeline(tmp_path)
    docs.project("texts", {"text": "text"}, asset=AGAIN)
    assert checked.run(docs, checks_alone=False).success
    found = checked.evaluation(docs)
    assert found.description == "1 row computed again; all match"

    (part,) = (tmp_path / "store").rglob("*.parquet")
    part.unlink()
    found = checked.evaluation(docs)
    assert not found.passed
    assert "could not be compared with what is stored" in found.description
    assert "is gone" in value(found, "error")
    result = checked.run(docs, config={"reproduce_partitions": ["a"]}, raise_on_error=False)
    assert "partition 'a' was never materialized" in failure(result)

    by_text = pipeline(tmp_path, "text")
    by_text.project("texts", {"n": "1"}, asset=AGAIN)
    found = checked.evaluation(by_text)
    assert not found.passed
    assert "identified by 'id' in the store, and by 'text' now" in found.description


def kinds(batch: pa.Table) -> dict[str, Any]:
    """Returns the type that the function was given."""
    return {"kind": [f"{batch['n'].type}, {batch.column_names}"] * len(batch)}


def test_a_sample_is_read_with_the_columns_of_all_files(checked):
    """Nearly all rows are of the narrow file, which alone has other columns."""
    narrow = pa.table({"id": range(300), "n": pa.array(range(300), pa.int16())})
    write_source(checked.folder / "source", narrow, "a.parquet")
    wide = pa.table({"id": [999], "n": [1 << 40], "extra": ["e"]})
    write_source(checked.folder / "source", wide, "b.parquet")
    docs = pipeline(checked.folder)
    check = vd.checks.Reproducible(rows=1)
    docs.map_batches("kinds", kinds, schema={"kind": "VARCHAR"}, asset=vd.Asset(checks=[check]))
    checked.run(docs, checks_alone=False)
    found = checked.evaluation(docs, config={"reproduce_seed": 7})
    assert found.passed, found.description
    assert (value(found, "rows"), value(found, "differing")) == (1, 0)
