"""The fixture store of version 1: later releases read it, find its keys and add to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import v1_pipelines as v1
import v1_store
from click.testing import CliRunner

import vane_dagster as vd
from support.in_process import committed, compute
from vane_dagster.cli.main import main
from vane_dagster.engine.inference import pinned
from vane_dagster.errors import NewerFormatError
from vane_dagster.orchestration.read import open_store
from vane_dagster.storage.batch_records import BatchFolder
from vane_dagster.storage.definition_texts import read_texts
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.row_floor import read_epoch

STORE = "store"
BRANCHED = {"orders/out": "branched/{partition_key}"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the fixture's sources and stores."""
    monkeypatch.setenv("LLM_KEY", "none is asked")
    with v1_store.unpacked() as unpacked:
        yield unpacked


def branch() -> vd.FragmentStore:
    return vd.FragmentStore(root="branch", fallback=STORE, targets=BRANCHED)


def missing() -> dict[str, int]:
    """Count the fragments that runs of all pipelines would compute, by stage."""
    plans = [pipeline.plan(store=STORE) for pipeline in v1.declared()]
    stages = [(plan.pipeline, each) for plan in plans for each in plan.stages]
    return {f"{name}/{each.stage}": each.fragments for name, each in stages if each.fragments}


def command(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


# Keys


def test_all_is_up_to_date():
    assert [p.name for p in v1.declared() if not p.plan(store=STORE).is_up_to_date] == []
    assert v1.orders(v1.Scaled).plan(store=STORE).is_up_to_date, "it is adopted"
    assert v1.orders(factor=0.25).plan("feb", store=branch()).is_up_to_date


def test_every_part_is_found_by_its_key():
    """Without manifests, which would say that the stages are up to date, parts are looked up."""
    for each in list(Path(STORE).rglob("manifests")):
        shutil.rmtree(each)
    assert missing() == {}


def test_an_edited_row_and_an_added_file_are_all_that_is_computed():
    orders = Path("orders/jan/a.parquet")
    rows = pq.read_table(orders).to_pylist()
    rows[5]["n"] = 50
    pq.write_table(pa.Table.from_pylist(rows), orders)
    Path("scans/c.bin").write_bytes(b"xxxxxxx")
    store = open_store(STORE, "test")

    events = compute(v1.orders(), store, v1.MONTHS)
    (cost,) = committed(events, "cost")
    assert (cost.partition, cost.stats.rows_in, cost.stats.copied) == ("jan", 1, 7)
    price = {
        row["id"]: row["price"] for row in vd.load("orders/cost", "jan", store=STORE).to_pylist()
    }
    assert price == {0: 2, 1: 4, 2: 8, 5: 102, 6: 20, 7: 16}
    compute(pinned(v1.files(), "bytes", store), store)
    assert vd.load("scans/bytes", store=STORE)["bytes"].to_pylist() == [3, 5, 7]
    assert missing() == {}


# Reading


def test_rows_are_read():
    both = vd.load("orders/both", "jan", store=STORE).to_pylist()
    assert both[:2] == [
        {"id": 0, "n": 0, "currency": "usd", "price": 2, "scaled": 0.0},
        {"id": 1, "n": 1, "currency": "eur", "price": 4, "scaled": 0.5},
    ]
    assert [row["price"] for row in both] == [2, 4, 8, 12, 20, 16]
    published = pq.read_table("published/jan")
    assert published.num_rows == 6
    whole = vd.load("notes/whole", store=STORE).to_pylist()
    assert whole[1] == {"note": "y", "text": None, "stars": 1, "split": [], "loud": []}
    assert whole[3]["loud"] == [{"word_id": "z-0", "loud": "BAD"}]
    live, batched = (vd.load(f"questions/{name}", store=STORE) for name in ("live", "batched"))
    assert live["live"].to_pylist() == batched["batched"].to_pylist()
    usage = [table[f"{n}_usage"][0].as_py() for n, table in (("live", live), ("batched", batched))]
    assert [(u["completion_tokens"], u["batch_requests"]) for u in usage] == [(4, 0), (4, 1)]
    assert vd.load("orders/size", "feb", store=branch())["scaled"].to_pylist()[:2] == [2.5, 2.75]


def test_rows_are_traced():
    trace = vd.trace("orders/out", 5, "jan", store=STORE)
    stages = ["source", "clean", "cost", "size", "both", "out"]
    assert [each.stage for each in trace.steps] == [f"orders/{name}" for name in stages]
    assert "adopted on" in str(vd.trace("orders/size", 4, "jan", store=STORE))
    assert "note x" in str(vd.trace("notes/loud", "x-1", store=STORE))
    forward = str(vd.trace("orders/clean", 2, "jan", forward=True, store=STORE))
    assert "published/jan" in forward


def test_failures_and_batches_are_read():
    failed = vd.quarantine("orders/cost", store=STORE).to_pylist()
    assert {row["id"]: row["message"] for row in failed} == {
        3: "n is 3",
        4: "n is 4",
        13: "n is 13",
    }
    (batch,) = BatchFolder(open_store(STORE, "test"), "questions", "batched").batches()
    assert (batch.state, batch.requests, batch.counts) == ("ended", 4, {"succeeded": 4})


def test_versions_of_runs_and_of_a_branch_are_compared():
    first, last = (
        json.loads(file.read_text())["run_id"]
        for file in sorted(Path(STORE, "scans/bytes/manifests/~unpartitioned").iterdir())
    )
    forced = vd.diff("scans/bytes", first, last, store=STORE)
    assert (forced.only_before, forced.only_now, forced.equal) == (0, 0, 2)
    assert vd.diff("orders/size", STORE, "./branch", store=STORE).different == 8


def test_commands_list_and_collect():
    listed = [json.loads(line) for line in command("store", "ls", STORE, "--json").splitlines()]
    assert {each["stage"]: each["rows"] for each in listed} == ROWS
    rows = {name: vd.load(name, store=STORE) for name in ROWS}
    list(collect(open_store(STORE, "test"), GcPolicy(now=4e9, keep=0, grace=0)))
    assert {name: vd.load(name, store=STORE) for name in ROWS} == rows
    assert missing() == {}


ROWS = {
    "notes/loud": 7, "notes/split": 7, "notes/texts": 4, "notes/whole": 4,
    "orders/both": 13, "orders/clean": 16, "orders/cost": 13, "orders/out": 13, "orders/size": 16,
    "questions/batched": 4, "questions/live": 4, "scans/bytes": 2,
}  # fmt: skip


# Later formats


def read_all() -> None:
    """Read every kind of record, the cheap ones first: each test of one ends with its error."""
    assert open_store("branch", "test").branch_of
    store = open_store(STORE, "test")
    BatchFolder(store, "questions", "batched").batches()
    read_epoch(store, "scans", "bytes")
    for manifest in Path(STORE, "orders/size/manifests/jan").iterdir():
        read_texts(store, "orders", "size", json.loads(manifest.read_text())["definition"])
    missing()
    list(collect(store, GcPolicy(now=4e9, keep=4e9, grace=4e9)))


RECORDS = [
    "store/notes/fragments.json",
    "store/orders/adopted-*.json",
    "store/orders/cost/condemned.json",
    "store/orders/out/target.json",
    "store/orders/size/definitions/*.json",
    "store/orders/both/manifests/jan/00000002-*.json",
    "store/questions/batched/batches/*.json",
    "store/scans/bytes/row_floor.json",
    "store/scans/bytes/schemas/*.json",
    "store/~tables/records/*/*.json",
    "branch/branch.json",
]


def test_records_of_a_later_format_are_refused():
    message = r"json' has format 2, but this release .* supports formats up to 1: .* Upgrade"
    for pattern in RECORDS:
        kept = {file: file.read_bytes() for file in Path().glob(pattern)}
        for file, data in kept.items():
            file.write_text(json.dumps({**json.loads(data), "format": 2}))
        with pytest.raises(NewerFormatError, match=message):
            read_all()
        for file, data in kept.items():
            file.write_bytes(data)
    read_all()
