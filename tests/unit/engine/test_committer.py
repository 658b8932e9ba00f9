"""The thread that commits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.in_process import committed, compute
from vane_dagster.engine.committer import Commit, Committer
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord
from vane_dagster.storage.store import Store


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_panics_is_the_error_of_its_partition(tmp_path: Path, monkeypatch):
    def panic(*args: object, **given: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", panic)
    docs, store = published(tmp_path, "delta")
    with pytest.raises(vd.errors.StoreError, match="committed: PanicException: index out of"):
        compute(docs, store)


def published(tmp_path: Path, format: str = "parquet") -> tuple[vd.Pipeline, Store]:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "rows.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "rows.parquet")), id="id")
    docs.project("kept", ["id"]).write("out", f"{tmp_path}/out", format=format)
    return docs, Store(Location(str(tmp_path / "store")))


def test_what_another_run_has_published_meanwhile_is_taken(tmp_path: Path, monkeypatch):
    docs, store = published(tmp_path)
    put, runs = Committer.put, []

    def late(self: Committer, commit: Commit) -> None:
        if not runs:
            runs.append("other")
            compute(docs, store)
        put(self, commit)

    monkeypatch.setattr(Committer, "put", late)
    (made,) = committed(compute(docs, store), "out")
    (name,) = store.manifests("docs", "out", None).names()
    assert str(made.name) == name


def test_local_files_are_hashed_once_before_their_commit(tmp_path: Path):
    hashed: list[str] = []
    store = Store(Location(str(tmp_path)))
    committer = Committer(store, lambda file: hashed.append(file.url), lambda _: nullcontext())
    new, known, remote = (
        FileRecord(url, 1, "v", content)
        for url, content in (("file:///new", None), ("file:///known", "abc"), ("s3://b/a", None))
    )
    committer.hash_ahead([new, known, remote, new])
    committer.hash_ahead([new])
    for each in committer._hashes.values():
        each.result()
    committer.close()
    assert hashed == ["file:///new"]
