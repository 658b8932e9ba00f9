"""`FragmentStore` as Dagster's IO manager: stages read by other assets, and their rows kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import column_of, write_source
from support.in_process import InProcessCompute
from support.results import over
from support.stored import keep
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.store import Store

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


def reader_of(kind: Any, inputs: list[Any], metadata: Any, **given: Any) -> dg.AssetsDefinition:
    """An asset that takes "docs/more" as `kind`, and nothing more than a resource from us."""

    def below(more: Any) -> None:
        inputs.append(more)

    below.__annotations__["more"] = kind
    if kind is None:
        del below.__annotations__["more"]
    ins = {"more": dg.AssetIn(["docs", "more"], metadata=metadata)}
    return dg.asset(ins=ins, **given)(below)


def values(read: Any) -> list[int]:
    return column_of(read, "m")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ordinary_assets_take_stages_by_their_annotations(store, ray_data, tmp_path):
    for number, key in enumerate(KEYS):
        rows = range(3 * number, 3 * number + 3)
        write_source(tmp_path / "src" / key, {"id": rows, "n": rows})
    source = vd.parquet(f"{tmp_path}/src/{{partition_key}}")
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=PARTS, fragment_rows=2)
    docs.project("clean", {"n": "n * 10"}).project("more", {"m": "n + 1"})
    stages = docs.build_assets()
    resources = {"compute": InProcessCompute(), "store": store, "io_manager": store}

    def taken(kind: Any, metadata: Any = None, **given: Any) -> Any:
        inputs: list[Any] = []
        run = given.pop("run", {})
        below = reader_of(kind, inputs, metadata, **given)
        assets = {"assets": [stages, below], "selection": [below], "resources": resources}
        assert dg.materialize(**assets, **run).success
        return inputs[0]

    # Partitions that are missing are named, or left out on request.
    assert dg.materialize([stages], resources=resources, partition_key="a").success
    with pytest.raises(vd.errors.StoreError) as raised:
        taken(pa.Table)
    assert "'docs/more': partitions 'b', 'c / ü' were never materialized" in str(raised.value)
    assert "allow_missing_partitions" in str(raised.value)
    assert values(taken(pa.Table, {"allow_missing_partitions": True})) == [1, 11, 21]

    # A partition, all of them, or a range in order, with some columns.
    assert dg.materialize([stages], resources=resources, tags=WHOLE).success
    last = {"partitions_def": PARTS, "run": {"partition_key": "c / ü"}}
    for kind, given, ids in (
        (None, last, range(6, 9)),
        (pa.RecordBatchReader, {}, range(9)),
        (pl.LazyFrame, last, range(6, 9)),
    ):
        read = taken(kind, **given)
        assert isinstance(read, kind or pa.Table)
        assert values(read) == [10 * n + 1 for n in ids]
    whole = {"partitions_def": PARTS, "backfill_policy": SINGLE_RUN, "run": {"tags": WHOLE}}
    read = taken(pa.Table, {"columns": ["m"]}, **whole)
    assert read.column_names == ["m"]
    assert values(read) == [10 * n + 1 for n in range(9)]

    # Outside of a run, as Dagster loads an asset's value.
    definitions = dg.Definitions([stages], resources=resources)
    key = docs["more"].key
    assert values(definitions.load_asset_value(key, partition_key="c / ü")) == [61, 71, 81]
    assert values(definitions.load_asset_value(key)) == [10 * n + 1 for n in range(9)]

    # Ray Data comes in and goes out. It is executed once, which takes longer than all before.
    def copied(more: Any) -> Any:
        assert isinstance(more, ray_data.Dataset)
        return more

    copied.__annotations__ = {"more": ray_data.Dataset, "return": ray_data.Dataset}
    asset = dg.asset(ins={"more": dg.AssetIn(["docs", "more"])})(copied)
    result = dg.materialize([stages, asset], selection=[asset], resources=resources)
    assert materialization(result).metadata["dagster/row_count"].value == 9
    assert sorted(values(vd.load("copied", store=store))) == [10 * n + 1 for n in range(9)]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3))
    keep(Store(StoragePath(store.root)), "tensors", "a", pa.table({"m": [0, 1], "t": tensors}))
    null = pa.array([[1.0, None] * 3], tensors.type.storage_type)  # in its file no bytes
    null = pa.ExtensionArray.from_storage(tensors.type, null)
    keep(Store(StoragePath(store.root)), "tensors", "b", pa.table({"m": [2], "t": null}))
    read = vd.load("tensors", as_=ray_data.Dataset, store=store, partition_column="day").sort("m")
    taken_rows = read.take_batch(3)
    first, second, _ = taken_rows["t"].tolist()
    assert [first, second] == tensors.to_numpy_ndarray().tolist()
    assert taken_rows["day"].tolist() == ["a", "a", "b"]


# What ordinary assets return


def ordinary(value: Any, annotation: Any = Any, **given: Any) -> dg.AssetsDefinition:
    def raw(context: dg.AssetExecutionContext) -> Any:
        return value(context) if callable(value) else value

    raw.__annotations__["context"] = dg.AssetExecutionContext  # Dagster reads no texts here
    raw.__annotations__["return"] = annotation
    if annotation is Any:
        del raw.__annotations__["return"]
    key = given.pop("key", ["Raw", "s3", "raw"])
    return dg.asset(io_manager_key="store", key=key, **given)(raw)


def put(asset: dg.AssetsDefinition, store: Any, **given: Any) -> dg.ExecuteInProcessResult:
    return dg.materialize([asset], resources={"store": store}, **given)


def kept(store: Any, partition: Any = None, path: str = "Raw/s3/raw") -> list[int]:
    return vd.load(path, partition, store=store)["id"].to_pylist()


def materialization(result: dg.ExecuteInProcessResult) -> Any:
    (event,) = result.get_asset_materialization_events()
    return event.materialization


ROWS = pa.table({"id": [1, 2, 3], "x": ["a", "b", "c"]})


def test_ordinary_assets_keep_what_they_return(store):
    def version(rows: Any) -> str:
        tags = materialization(put(ordinary(rows), store)).tags
        return str(tags["dagster/data_version"])

    def chosen(context: dg.AssetExecutionContext) -> pa.Table:
        context.set_data_version(context.asset_key, dg.DataVersion("mine"))
        return ROWS

    # Rows are kept with their metadata, and a version of them.
    event = materialization(put(ordinary(ROWS, pa.Table), store))
    assert kept(store) == [1, 2, 3]
    found = {name: value.value for name, value in event.metadata.items()}
    assert found["dagster/row_count"] == 3
    assert [column.name for column in found["dagster/column_schema"].columns] == ["id", "x"]
    assert Path(found["dagster/uri"]).is_file()
    assert found["bytes"] > 0
    first = version(ROWS)
    assert version(ROWS) == version(ROWS.slice(0)) == first
    assert version(ROWS.slice(1)) != first
    assert version(chosen) == "mine"

    # Another asset reads them; those before are collected.
    inputs: list[Any] = []

    @dg.asset(ins={"raw": dg.AssetIn(["Raw", "s3", "raw"])})
    def last(raw: pl.LazyFrame) -> None:
        inputs.append(raw.collect()["id"].to_list())

    given = {"resources": {"store": store, "io_manager": store}}
    assert dg.materialize([ordinary(ROWS.to_reader()), last], **given).success
    assert inputs == [[1, 2, 3]]
    put(ordinary(ROWS.slice(1)), store)
    opened, now = store.open(), time.time()
    marked = list(collect(opened, GcPolicy(now + DAY, 60.0, 3600.0)))
    assert sum(len(stage.condemned) for stage in marked) == 1
    # Rows that are about to be deleted, and come back, go to a file of another name.
    put(ordinary(ROWS), store)
    swept = list(collect(opened, GcPolicy(now + 2 * DAY, 60.0, 3600.0)))
    assert sum(len(stage.deleted) for stage in swept) == 1
    assert kept(store) == [1, 2, 3]

    # Partitions are kept apart; a run of several returns a dict of them.
    options = {"partitions_def": PARTS, "key": "parts"}
    event = materialization(put(ordinary(ROWS, **options), store, partition_key="b"))
    assert event.partition == "b"
    assert event.metadata["dagster/partition_row_count"].value == 3
    assert kept(store, path="parts") == kept(store, "b", "parts") == [1, 2, 3]
    by_key = {key: ROWS.slice(number) for number, key in enumerate(KEYS)}
    single = ordinary(by_key, **options, backfill_policy=SINGLE_RUN)
    result = put(single, store, tags=WHOLE)
    assert [kept(store, key, "parts") for key in KEYS] == [[1, 2, 3], [2, 3], [3]]
    events = [event.materialization for event in result.get_asset_materialization_events()]
    assert {event.partition for event in events} == set(KEYS)
    assert events[0].metadata["rows"].value == 6


DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-05")
GRID = dg.MultiPartitionsDefinition({"day": DAYS, "region": dg.StaticPartitionsDefinition(["eu"])})
KEYS_OF_DAYS = DAYS.get_partition_keys()


@pytest.mark.parametrize(
    ("partitions_def", "keys"),
    [
        (DAYS, KEYS_OF_DAYS),
        (dg.DynamicPartitionsDefinition(name="customers"), ["z", "y", "x", "w"]),
        (GRID, [dg.MultiPartitionKey({"day": day, "region": "eu"}) for day in KEYS_OF_DAYS]),
    ],
    ids=["days", "dynamic", "dimensions"],
)
def test_checks_without_partitions_get_those_of_the_run(partitions_def, keys, store):
    given = {"key": "parts", "partitions_def": partitions_def, "backfill_policy": SINGLE_RUN}
    ids = {str(key): pa.table({"id": [number]}) for number, key in enumerate(keys)}
    parts = ordinary(lambda run: {key: ids[key] for key in run.partition_keys}, **given)
    taken: list[list[int]] = []

    @dg.asset_check(asset=parts)
    def many(parts: pa.Table) -> dg.AssetCheckResult:
        taken.append(parts["id"].to_pylist())
        return dg.AssetCheckResult(passed=True)

    only = dg.AssetSelection.checks(many)
    both = dg.AssetSelection.assets(parts) | only

    def run(selection: dg.AssetSelection, *edges: str, **given: Any) -> list[int]:
        names = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
        given |= {"resources": {"store": store, "io_manager": store}, "instance": instance}
        given |= {"tags": {name: str(key) for name, key in zip(names, edges)}}
        assert dg.materialize([parts, many], selection=selection, **given).success
        return taken[-1]

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("customers", keys)
        assert run(both, partition_key=keys[0]) == [0]
        assert run(both, keys[1], keys[2]) == [1, 2]
        assert run(only) == [0, 1, 2], "outside of a run of partitions, those that there are"
        assert run(only, keys[2], keys[2]) == [2]
        with pytest.raises(vd.errors.StoreError, match="was never materialized"):
            run(only, keys[2], keys[3])


def test_another_resource_is_no_store() -> None:
    docs = vd.Pipeline("docs", source=vd.table([{"id": 1}]), id="id")
    docs.project("clean", ["id"])
    with pytest.raises(dg.Failure, match=r"'store' is a \w+; expected vd.FragmentStore.*replaces"):
        dg.materialize_to_memory([docs.build_assets()], resources={"compute": vd.LocalCompute()})
    resources = {"compute": vd.FragmentStore(), "store": vd.FragmentStore()}
    with pytest.raises(dg.Failure, match="'compute' is a FragmentStore; expected vd"):
        dg.materialize([docs.build_assets()], resources=resources)
