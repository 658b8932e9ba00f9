"""`FragmentStore` as Dagster's IO manager: stages read by other assets, and their rows kept."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import column_of, write_source
from support.results import over
from vane_dagster.storage.gc import GcPolicy, collect

pytestmark = pytest.mark.filterwarnings(
    "ignore::dagster.BetaWarning", "ignore::dagster.PreviewWarning"
)

KEYS = ("a", "b", "c / ü")
PARTS = dg.StaticPartitionsDefinition(list(KEYS))
WHOLE = over(*KEYS)["tags"]
SINGLE_RUN = dg.BackfillPolicy.single_run()
DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> vd.FragmentStore:
    return vd.FragmentStore(root=str(tmp_path / "store"))


def docs(root: Path, partitions_def: Any = PARTS) -> vd.Pipeline:
    made = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{root}/src/{'{partition_key}' if partitions_def else ''}"),
        id="id",
        partitions_def=partitions_def,
        fragment_rows=2,
    )
    made.project("clean", {"n": "n * 10"}).project("more", {"m": "n + 1"})
    return made


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> vd.FragmentStore:
    """The store of `pipeline`."""
    return vd.FragmentStore(root=str(tmp_path_factory.mktemp("filled") / "store"))


@pytest.fixture(scope="module")
def pipeline(filled: vd.FragmentStore, local: Any) -> vd.Pipeline:
    """A pipeline whose three partitions of three rows are materialized. No test changes them."""
    folder = Path(filled.root).parent
    for number, key in enumerate(KEYS):
        start = 3 * number
        write_source(
            folder / "src" / key, {"id": range(start, start + 3), "n": range(start, start + 3)}
        )
    made = docs(folder)
    resources = {"compute": local, "store": filled}
    assert dg.materialize([made.build_assets()], resources=resources, tags=WHOLE).success
    return made


def run(assets: Any, pipeline: vd.Pipeline, store: Any, **given: Any) -> dg.ExecuteInProcessResult:
    """Materializes ordinary assets and checks beside a pipeline that is materialized already."""
    selection = dg.AssetSelection.assets(
        *(asset for asset in assets if not isinstance(asset, dg.AssetChecksDefinition))
    ) | dg.AssetSelection.checks(
        *(asset for asset in assets if isinstance(asset, dg.AssetChecksDefinition))
    )
    return dg.materialize(
        [pipeline.build_assets(), *assets],
        selection=selection,
        resources={"compute": vd.LocalCompute(), "store": store},
        **given,
    )


def reader_of(kind: Any, inputs: list[Any], **given: Any) -> dg.AssetsDefinition:
    """An asset that takes "docs/more" as `kind`, and nothing more than a resource from us."""

    def below(more: Any) -> None:
        inputs.append(more)

    below.__annotations__["more"] = kind
    if kind is None:
        del below.__annotations__["more"]
    metadata = given.pop("metadata", None)
    ins = {"more": dg.AssetIn(["docs", "more"], metadata=metadata)}
    return dg.asset(ins=ins, **given)(below)


def values(read: Any) -> list[int]:
    return column_of(read, "m")


@pytest.mark.parametrize(
    ("kind", "given", "ids"),
    [
        (None, {"partitions_def": PARTS}, range(6, 9)),
        (pa.RecordBatchReader, {}, range(9)),
        (pl.LazyFrame, {"partitions_def": PARTS}, range(6, 9)),
    ],
)
def test_an_asset_takes_a_partition_or_all_by_its_annotation(pipeline, filled, kind, given, ids):
    inputs: list[Any] = []
    key = "c / ü" if given else None
    assert run([reader_of(kind, inputs, **given)], pipeline, filled, partition_key=key).success
    (read,) = inputs
    assert isinstance(read, kind or pa.Table)
    assert values(read) == [10 * n + 1 for n in ids]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_an_asset_takes_and_returns_ray_data(pipeline, filled, store, ray_data):
    """In one execution of the dataset, which takes longer than all other tests here."""

    def copied(more: Any) -> Any:
        assert isinstance(more, ray_data.Dataset)
        return more

    copied.__annotations__ = {"more": ray_data.Dataset, "return": ray_data.Dataset}
    made = dg.asset(ins={"more": dg.AssetIn(["docs", "more"])})(copied)
    result = dg.materialize(
        [pipeline.build_assets(), made],
        selection=[made],
        resources={"compute": vd.LocalCompute(), "store": filled, "io_manager": store},
    )
    assert materialization(result).metadata["dagster/row_count"].value == 9
    rows = vd.load("copied", store=store)
    assert sorted(values(rows)) == [10 * n + 1 for n in range(9)]


def test_a_range_of_partitions_is_one_table_in_order(pipeline, filled):
    inputs: list[Any] = []
    chosen = {"backfill_policy": SINGLE_RUN, "metadata": {"columns": ["m"]}}
    below = reader_of(pa.Table, inputs, partitions_def=PARTS, **chosen)
    assert run([below], pipeline, filled, tags=WHOLE).success
    assert [values(table) for table in inputs] == [[10 * n + 1 for n in range(9)]]
    assert inputs[0].column_names == ["m"]
    with pytest.raises(vd.errors.StoreError, match="expected one of pyarrow"):
        run([reader_of(dict[str, pa.Table], [])], pipeline, filled)


def test_missing_partitions(tmp_path, store, local):
    write_source(tmp_path / "src" / "a", {"id": [1], "n": [1]})
    made = docs(tmp_path)
    resources = {"compute": local, "store": store}
    assert dg.materialize([made.build_assets()], resources=resources, partition_key="a").success
    with pytest.raises(vd.errors.StoreError) as raised:
        run([reader_of(pa.Table, [])], made, store)
    assert "'docs/more': partitions 'b', 'c / ü' were never materialized" in str(raised.value)
    assert "allow_missing_partitions" in str(raised.value)
    inputs: list[Any] = []
    allowed = reader_of(pa.Table, inputs, metadata={"allow_missing_partitions": True})
    assert run([allowed], made, store).success
    assert values(inputs[0]) == [11]


# What ordinary assets return


def ordinary(value: Any, annotation: Any = Any, **given: Any) -> dg.AssetsDefinition:
    def raw(context: dg.AssetExecutionContext) -> Any:
        return value(context) if callable(value) else value

    raw.__annotations__["context"] = dg.AssetExecutionContext  # Dagster reads no texts here
    raw.__annotations__["return"] = annotation
    if annotation is Any:
        del raw.__annotations__["return"]
    return dg.asset(io_manager_key="store", key_prefix=["Raw", "s3"], **given)(raw)


def put(asset: dg.AssetsDefinition, store: Any, **given: Any) -> dg.ExecuteInProcessResult:
    return dg.materialize([asset], resources={"store": store}, **given)


def kept(store: Any, partition: Any = None) -> list[int]:
    return vd.load("Raw/s3/raw", partition, store=store)["id"].to_pylist()


def materialization(result: dg.ExecuteInProcessResult) -> Any:
    (event,) = result.get_asset_materialization_events()
    return event.materialization


ROWS = pa.table({"id": [1, 2, 3], "x": ["a", "b", "c"]})


def test_what_an_asset_returns_is_kept_with_a_version_of_its_rows(store):
    def version(rows: Any) -> str:
        tags = materialization(put(ordinary(rows), store)).tags
        return str(tags["dagster/data_version"])

    def chosen(context: dg.AssetExecutionContext) -> pa.Table:
        context.set_data_version(context.asset_key, dg.DataVersion("mine"))
        return ROWS

    event = materialization(put(ordinary(ROWS, pa.Table), store))
    assert kept(store) == [1, 2, 3]
    found = {name: value.value for name, value in event.metadata.items()}
    assert found["dagster/row_count"] == 3
    assert [column.name for column in found["dagster/column_schema"].columns] == ["id", "x"]
    assert Path(found["dagster/uri"]).is_file()
    assert found["files"] == 1
    assert found["bytes"] > 0
    first = version(ROWS)
    assert version(ROWS) == version(ROWS.slice(0)) == first
    assert version(ROWS.slice(1)) != first
    assert version(chosen) == "mine"


def test_partitions_are_kept_apart(store):
    event = materialization(put(ordinary(ROWS, partitions_def=PARTS), store, partition_key="b"))
    assert event.partition == "b"
    assert event.metadata["dagster/partition_row_count"].value == 3
    assert kept(store) == kept(store, "b") == [1, 2, 3]

    given = {"partitions_def": PARTS, "backfill_policy": SINGLE_RUN}
    with pytest.raises(vd.errors.StoreError) as raised:
        put(ordinary(ROWS, **given), store, tags=WHOLE)
    expected = "expected a dict of partition key to rows, of 'a', 'b', 'c / ü'"
    assert f"returned a Table; {expected}" in str(raised.value)
    with pytest.raises(vd.errors.StoreError) as raised:
        put(ordinary({"a": ROWS, "x": ROWS}, **given), store, tags=WHOLE)
    assert f"returned a dict of 'a', 'x'; {expected}" in str(raised.value)
    by_key = {key: ROWS.slice(number) for number, key in enumerate(KEYS)}
    result = put(ordinary(by_key, **given), store, tags=WHOLE)
    assert [kept(store, key) for key in KEYS] == [[1, 2, 3], [2, 3], [3]]
    events = [event.materialization for event in result.get_asset_materialization_events()]
    assert {event.partition for event in events} == set(KEYS)
    assert events[0].metadata["rows"].value == 6


def test_nothing_and_what_is_no_rows(store, tmp_path):
    assert put(ordinary(None, None), store).success
    assert not (tmp_path / "store").exists()
    for value, message in (
        (None, "returned a builtins.NoneType; expected one of .* nothing by .* -> None"),
        ([1, 2], "'Raw/s3/raw' returned a builtins.list; expected one of pyarrow.Table"),
        ({"a": ROWS}, "returned a builtins.dict"),
    ):
        with pytest.raises(vd.errors.StoreError) as raised:
            put(ordinary(value), store)
        assert re.search(message, str(raised.value))


def test_an_ordinary_asset_is_read_by_another_and_its_former_rows_are_collected(store, tmp_path):
    inputs: list[Any] = []

    @dg.asset(ins={"raw": dg.AssetIn(["Raw", "s3", "raw"])})
    def last(raw: pl.LazyFrame) -> None:
        inputs.append(raw.collect()["id"].to_list())

    given = {"resources": {"store": store, "io_manager": store}}
    assert dg.materialize([ordinary(ROWS.to_reader()), last], **given).success
    assert inputs == [[1, 2, 3]]
    put(ordinary(ROWS.slice(1)), store)
    opened, now = store.open(), time.time()
    first = list(collect(opened, GcPolicy(now + DAY, 60.0, 3600.0)))
    assert sum(len(stage.condemned) for stage in first) == 1
    # Rows that are about to be deleted, and come back, go to a file of another name.
    put(ordinary(ROWS), store)
    second = list(collect(opened, GcPolicy(now + 2 * DAY, 60.0, 3600.0)))
    assert sum(len(stage.deleted) for stage in second) == 1
    assert kept(store) == [1, 2, 3]
