"""Tensors from a Parquet source through every kind of stage, to Parquet, Delta and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.sources.parquet import ParquetSource

ROWS = 12
LARGE = (200, 200, 3)
"""More elements than DuckDB's arrays can have."""
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, *LARGE), dtype=np.uint8)
GRIDS = np.arange(ROWS * 6, dtype=np.int8).reshape(ROWS, 2, 3)
LEFT = [n for n in range(ROWS) if n != 7]


@pytest.fixture
def source(tmp_path: Path) -> ParquetSource:
    gaps = [None if n % 3 else [n, n] for n in range(ROWS)]
    table = pa.table(
        {
            "id": range(ROWS),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(IMAGES),
            "grid": pa.array(GRIDS.tolist(), pa.list_(pa.list_(pa.int8(), 3), 2)),
            "gaps": pa.array(gaps, pa.list_(pa.float16(), 2)),
        }
    )
    write_source(tmp_path / "src", table, row_group_size=5)
    return vd.parquet(f"{tmp_path}/src")


def planes(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Numpy in, numpy out: images of another type, with the channels first."""
    assert batch["image"].shape[1:] == LARGE
    assert batch["grid"].shape[1:] == (2, 3)
    return {
        "planes": np.moveaxis(batch["image"], -1, 1).astype(np.float16),
        "turned": batch["grid"],
    }


def brightness(batch: dict[str, Any]) -> dict[str, Any]:
    """Torch in, torch out: an array of shape (n, 1) for a column of scalars."""
    import torch

    assert batch["planes"].dtype == torch.float16
    return {"mean": batch["planes"].float().mean(dim=(1, 2, 3)).unsqueeze(1)}


def corners(batch: pd.DataFrame) -> Any:
    """Pandas in, pandas out: two tensors of one."""
    cut = [image[at : at + 2, :2] for image in batch["image"] for at in (0, 10)]
    return pd.DataFrame({"id": np.repeat(batch["id"].to_numpy(), 2), "corner": cut})


def turned_back(grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A row in, a row out."""
    return grid.T


def test_tensors_survive_every_stage(source, tmp_path, local, materialize):
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=6)
    clean = docs.project("clean", ["image", "grid", "gaps"], where="len(image) > 9 AND id <> 7")
    ends = clean.project("ends", {"image": "image", "last": "grid[2][3]", "pixel": "image[120000]"})
    fields = {"planes": vd.tensor("float16", (3, 200, 200)), "turned": "TINYINT[3][2]"}
    first = [np.moveaxis(IMAGES[0], -1, 0).reshape(-1) + 0.1]
    expected = pa.table({"id": [0], "planes": pa.array(first, fields["planes"])})
    mapped = clean.map_batches(
        "mapped",
        planes,
        schema=fields,
        batch_format="numpy",
        batch_size=4,
        asset=vd.Asset(checks=[vd.checks.Golden(expected, tolerance=0.2)]),
    )
    mean = mapped.map_batches(
        "mean", brightness, schema={"mean": "FLOAT"}, batch_format="torch",
        include_columns=["turned"], batch_size=2,
    )  # fmt: skip
    row = clean.map("row", turned_back, schema={"row": vd.tensor("int8", (3, 2))})
    cut = ends.map_batches(
        "cut",
        corners,
        schema={"corner_id": "VARCHAR", "corner": vd.tensor("uint8", (2, 2, 3))},
        batch_format="pandas",
        cardinality=vd.Children("corner_id"),
    )
    only = {"ends": ["last", "pixel"]}
    means = mean.project("means", ["mean"])
    joined = docs.join("joined", clean, mapped, means, ends, row, columns=only)
    lists = docs.join("lists", ends, cut, children="list")
    docs.join("children", ends, cut, children="rows")
    for name, options in {
        "folder": {}, "delta": {"format": "delta", "target_file_bytes": 1 << 20},
    }.items():  # fmt: skip
        joined.write(name, f"{tmp_path}/{name}", **grouped(options))
    lists.write("lists_in_delta", f"{tmp_path}/lists", format="delta")
    result = materialize(docs, local)
    store = tmp_path / "store"

    found = read_stage(store, "docs", "joined")
    kinds = {field.name: field.type for field in found.schema}
    assert found["id"].to_pylist() == LEFT
    assert kinds["image"] == vd.tensor("uint8", LARGE)
    assert kinds["grid"] == pa.list_(pa.list_(pa.int8(), 3), 2)
    assert kinds["gaps"] == pa.list_(pa.float16(), 2)
    assert kinds["planes"] == fields["planes"]
    assert_rows(found)
    assert found["gaps"].to_pylist() == [None if n % 3 else [n, n] for n in LEFT]
    assert found["last"].to_pylist() == [int(GRIDS[n, 1, 2]) for n in LEFT]
    assert found["pixel"].to_pylist() == [int(IMAGES[n].flat[-1]) for n in LEFT]
    assert found["row"].to_pylist() == [GRIDS[n].T.reshape(-1).tolist() for n in LEFT]
    assert np.allclose(found["mean"].to_numpy(), [IMAGES[n].mean() for n in LEFT])
    carried = read_stage(store, "docs", "mean")
    assert carried["turned"].to_pylist() == [GRIDS[n].tolist() for n in LEFT]
    corner = IMAGES[LEFT[-1], 10:12, :2].reshape(-1).tolist()
    assert read_stage(store, "docs", "children")["corner"].to_pylist()[-1] == corner
    assert read_stage(store, "docs", "lists")["cut"].to_pylist()[-1][-1]["corner"] == corner
    passed = {e.check_name: e.passed for e in result.get_asset_check_evaluations()}
    assert passed["golden"], "within the tolerance"
    columns = metadata(result, "joined")["dagster/column_schema"].columns
    assert {c.name: c.type for c in columns}["image"] == 'vd.tensor("uint8", (200, 200, 3))'

    parquet = pq.read_table(tmp_path / "folder")
    assert parquet.schema.field("image").type == kinds["image"]
    assert_rows(parquet.sort_by("id"))
    table = pa.table(DeltaTable(tmp_path / "delta").to_pyarrow_dataset().to_table()).sort_by("id")
    assert table.schema.field("image").type == pa.list_(pa.int16())
    assert table["image"].to_pylist()[-1] == IMAGES[LEFT[-1]].reshape(-1).tolist()
    loaded = vd.load("docs/delta", store=str(store)).sort_by("id")
    assert loaded["image"].to_pylist()[-1] == table["image"].to_pylist()[-1]


def assert_rows(found: pa.Table) -> None:
    """The rows of a join, in order."""
    images = np.stack([np.array(row, np.uint8) for row in found["image"].to_pylist()])
    assert np.array_equal(images.reshape(-1, *LARGE), IMAGES[LEFT])
    stacked = np.stack([np.array(row, np.float16) for row in found["planes"].to_pylist()])
    assert np.array_equal(stacked.reshape(-1, 3, 200, 200), np.moveaxis(IMAGES[LEFT], -1, 1))
    assert found["grid"].to_pylist() == GRIDS[LEFT].tolist() == found["turned"].to_pylist()
