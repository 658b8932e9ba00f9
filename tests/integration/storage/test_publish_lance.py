"""Vector indexes of Lance tables that `write` publishes."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import vane_dagster as vd
from support.data import write_source
from support.published import docs
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.table_options import driver_options

DIMENSION = 16
INDEX = {"column": "e", "metric": "cosine"}


def rows(ids: Any) -> pa.Table:
    """Rows with a vector that depends on the id alone."""
    vectors = [np.random.default_rng(i).random(DIMENSION).astype("f4") for i in ids]
    vector = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(vectors)), DIMENSION)
    return pa.table({"id": pa.array(ids, pa.int64()), "n": pa.array(ids, pa.int64()), "e": vector})


def published(root: Path, **given: Any) -> vd.Pipeline:
    return docs(root, columns=["n", "e"], format="lance", fragment_rows=100, **given)


def nearest(table: Any, id: int) -> list[int]:
    query = {"column": "e", "q": rows([id])["e"][0].as_py(), "k": 1, "refine_factor": 20}
    query |= {"nprobes": 50, "metric": "cosine"}
    return table.to_table(columns=["id", "_distance"], nearest=query)["id"].to_pylist()


def unindexed(table: Any) -> int:
    (index,) = table.describe_indices()
    covered = {id for segment in index.segments for id in segment.fragment_ids}
    return sum(f.fragment_id not in covered for f in table.get_fragments())


def test_search_with_and_without_an_index_on_s3(tmp_path, local, materialize, s3):
    url, keys = f"s3://lake/{uuid.uuid4().hex}/to here", ["a b", "c%2Fd", "e"]
    given = {"keys": keys, "out": url, "storage_options": s3}

    def table(key: str, where: str | None = None, index: Any = INDEX) -> Any:
        materialize(published(tmp_path, where=where, index=index, **given), local, partition=key)
        place = Location(url, s3)
        return lance.dataset(place.url, storage_options=driver_options(place))

    for key, first, count in zip(keys, (0, 1000, 2000), (100, 400, 60)):
        write_source(tmp_path / "src" / key, rows(range(first, first + count)))

    found = table(keys[0])
    assert found.describe_indices() == [], "100 rows train no index"
    assert nearest(found, 42) == [42]
    found = table(keys[1])
    (index,) = found.describe_indices()
    assert index.field_names == ["e"]
    assert index.details["metric_type"] == "COSINE"
    assert "pq" in str(index.details)
    assert unindexed(found) == 0
    assert [nearest(found, id) for id in (42, 1042, 1399)] == [[42], [1042], [1399]]
    found = table(keys[2])
    assert unindexed(found) == 0
    assert nearest(found, 2042) == [2042]
    found = table(keys[1], "id <> 1042")
    assert unindexed(found) == 0
    assert nearest(found, 1042) != [1042], "a row that is gone is not found"
    assert nearest(found, 1043) == [1043]
    other = {"column": "e", "metric": "l2", "type": "IVF_FLAT", "num_partitions": 2}
    (index,) = table(keys[1], index=other).describe_indices()
    assert index.details["metric_type"] == "L2"
    assert "pq" not in str(index.details)
