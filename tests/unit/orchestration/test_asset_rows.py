"""What `FragmentStore` refuses to keep and to load, with the fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.orchestration.asset_rows import keep_rows, load_rows

ROWS = pa.table({"id": [1]})
A_DICT = "; expected a dict of partition key to rows, of 'a', 'b', or give the asset backfill_polic"


def context(annotation: Any = Any, keys: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        name="raw",
        dagster_type=SimpleNamespace(typing_type=annotation),
        asset_key=dg.AssetKey(["Raw", "raw"]),
        run_id="run",
        definition_metadata={},
        has_asset_partitions=bool(keys),
        asset_partition_keys=keys,
        asset_partitions_def=dg.StaticPartitionsDefinition([*keys]),
        step_context=SimpleNamespace(instance=None),
    )


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (None, (), "returned a builtins.NoneType; expected one of pyarrow.Table"),
        (None, (), "or nothing by a function with -> None"),
        ([1, 2], (), "asset 'Raw/raw' returned a builtins.list; expected one of pyarrow.Table"),
        ({"a": ROWS}, (), "returned a builtins.dict"),
        (ROWS, ("a", "b"), f"returned a Table{A_DICT}"),
        ({"a": ROWS, "x": ROWS}, ("a", "b"), f"returned a dict of 'a', 'x'{A_DICT}"),
    ],
)
def test_what_is_no_rows_is_not_kept(tmp_path: Path, value: Any, keys: Any, message: str) -> None:
    with pytest.raises(vd.errors.StoreError) as raised:
        keep_rows(vd.FragmentStore(root=str(tmp_path)), context(keys=keys), value)
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_an_asset_may_return_nothing_if_it_says_so(tmp_path: Path) -> None:
    keep_rows(vd.FragmentStore(root=str(tmp_path)), context(type(None)), None)
    assert not list(tmp_path.iterdir())


def test_an_input_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(vd.errors.StoreError, match="expected one of pyarrow"):
        load_rows(vd.FragmentStore(root=str(tmp_path)), context(dict[str, pa.Table]))
