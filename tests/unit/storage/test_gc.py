"""Parts that nobody needs are removed, and never one that somebody does."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import write_source
from support.plans import missing, plan, settle
from support.snapshots import Snapshot
from vane_dagster.cli.main import main
from vane_dagster.storage.batch_records import BatchFolder, ProviderBatch, record_requests
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, GcReport, collect
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.store import Store

DAY = 86_400.0


def docs(root: Path, text: str = "lower(text)") -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet(f"{root}/src"), id="id")
    clean = docs.project("clean", {"text": text})
    clean.project("long", {"length": "length(text)"})
    clean.write("out", f"{root}/out")
    return docs


def store(root: Path) -> Store:
    return Store(StoragePath(str(root / "store")))


def run(root: Path, text: str = "lower(text)", *stages: str) -> dict[str, int]:
    """Plan and commit; return the number of fragments that the run had to compute by stage."""
    planned = plan(docs(root, text), store(root), *stages)
    settle(planned, store(root))
    return missing(planned)


@pytest.fixture(scope="module")
def once_made(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder = tmp_path_factory.mktemp("made") / "root"
    write_source(folder / "src", {"id": [1, 2, 3], "text": ["A", "Bb", "Ccc"]})
    run(folder)
    run(folder, "upper(text)")
    return Snapshot(folder)


@pytest.fixture
def made(once_made: Snapshot) -> Path:
    """A store that holds two versions of all stages."""
    return once_made.restore()


def gc(root: Path, days: float = 0.0, **terms: Any) -> dict[str, GcReport]:
    """Collect as if some days had passed."""
    policy = GcPolicy(time.time() + days * DAY, keep=7 * DAY, grace=DAY, **terms)
    return {report.stage: report for report in collect(store(root), policy)}


def counts(reports: dict[str, GcReport], stage: str) -> tuple[int, ...]:
    """Parts marked and deleted, and former manifests and unfinished files deleted."""
    found = reports[f"docs/{stage}"]
    kinds = (found.condemned, found.deleted, found.manifests, found.temporaries)
    return tuple(map(len, kinds))


def files(root: Path, stage: str = "clean") -> tuple[int, int]:
    folder = root / "store" / "docs" / stage
    return len([*folder.glob("parts/*/*.parquet")]), len([*folder.glob("manifests/*/*.json")])


def staged(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("out/_vane_staging/*"))


def test_former_versions_go_in_two_steps(made):
    """What a killed writer left goes at once. Files of others stay."""
    folder = next((made / "store/docs/clean/parts").iterdir())
    (folder / ".writing-00ff").write_bytes(b"half a part")
    (folder / "notes.txt").write_text("of somebody else")
    for days in (0, 6):
        assert counts(gc(made, days), "clean") == (0, 0, 0, 0)
    assert counts(gc(made, 8), "clean") == (1, 0, 1, 1)
    assert files(made) == (2, 1)
    assert counts(gc(made, 8.5), "clean") == (1, 0, 0, 0), "the grace period is not over"
    assert counts(gc(made, 9.1, dry_run=True), "clean") == (0, 1, 0, 0)
    assert files(made) == (2, 1)
    assert counts(gc(made, 9.1), "clean") == (0, 1, 0, 0)
    assert files(made) == files(made, "long") == (1, 1)
    assert run(made, "upper(text)") == {}
    assert counts(gc(made, 100), "clean") == (0, 0, 0, 0)
    assert not (made / "store/docs/clean/condemned.json").exists()
    assert sorted(path.suffix for path in folder.iterdir()) == [".parquet", ".txt"]


def test_without_keep_what_runs_in_progress_have_written_stays_for_the_grace_period(made):
    stage = made / "store/docs/clean"
    batches = BatchFolder(store(made), "docs", "clean")
    batch = ProviderBatch("m", 0.0, "r", 1, (None,), ("clean",), ended_at=time.time(), name="b")
    batches.add(batch, {"0" * 32: "{}"})
    batches.end(batch, {})
    record_requests(batches.path, {"1" * 32: "{}"})
    for folder in (*stage.glob("parts/*"), *stage.glob("manifests/*")):
        (folder / ".writing-00ff").write_bytes(b"half a file")
    for name in ("definitions/ff.json", "failed/~unpartitioned/1.parquet"):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_bytes(b"")
    written = ["*/*/.writing-00ff", "definitions/ff.json", "failed/*/*", "batches/*"]

    def collected(days: float) -> int:
        list(collect(store(made), GcPolicy(time.time() + days * DAY, 0.0, DAY)))
        return sum(len([*stage.glob(pattern)]) for pattern in written)

    assert collected(0.1) == 2 + 1 + 1 + 3
    assert collected(1.1) == 0


def test_the_command_says_what_it_would_do_and_did(made):
    words = ["store", "gc", str(made / "store"), "--keep", "0s"]
    shown = CliRunner().invoke(main, [*words, "--dry-run"]).output
    assert "docs/clean: would have deleted 1 former manifest (" in shown
    assert ", marked 1 part (" in shown
    lines = CliRunner().invoke(main, [*words, "--dry-run", "--json"]).output.splitlines()
    (clean,) = [each for each in map(json.loads, lines) if each["stage"] == "docs/clean"]
    (marked,) = clean["condemned"]
    assert f"{made}/store/docs/clean/parts/" in marked
    assert "docs/clean: deleted 1 former manifest (" in CliRunner().invoke(main, words).output
    assert files(made) == (2, 1)
    shown = CliRunner().invoke(main, [*words[:-1], "9d", "--dry-run"]).output
    assert re.fullmatch(r"Nothing is to be deleted or marked in \d stages\.\n", shown)


def test_condemned_parts_are_not_built_on_unless_they_are_named_again(made):
    """A run may have planned before the condemnation, and committed after it."""
    condemned = made / "store/docs/clean/condemned.json"
    gc(made, 8)
    assert missing(plan(docs(made), store(made)))["clean"] == 1
    condemned.rename(made / "kept.json")
    assert "clean" not in run(made)
    (made / "kept.json").rename(condemned)
    assert counts(gc(made, 10), "clean")[1] == 0
    assert run(made) == {}


def test_a_plan_made_while_parts_are_deleted_does_not_build_on_them(made, monkeypatch):
    gc(made, 8)
    delete, planned = StoragePath.delete, []

    def late(location: StoragePath, names: list[str]) -> None:
        if "/clean/parts/" in location.url:
            planned.append(missing(plan(docs(made), store(made)))["clean"])
        delete(location, names)

    monkeypatch.setattr(StoragePath, "delete", late)
    assert counts(gc(made, 10), "clean")[1] == 1
    assert planned == [1]


def test_a_part_that_a_run_commits_during_a_collection_is_not_condemned(made, monkeypatch):
    entries, ran = StoragePath.entries, []

    def late(location: StoragePath) -> Any:
        if location.url.endswith("/clean/parts/~unpartitioned") and not ran:
            ran.append(run(made, "lower(text)", "clean"))
        return entries(location)

    monkeypatch.setattr(StoragePath, "entries", late)
    assert counts(gc(made, 8), "clean") == (0, 0, 1, 0)
    assert ran == [{}]


def test_a_manifest_that_goes_while_it_is_read_is_passed_over(made, monkeypatch):
    opened = Store.opened
    former = min((made / "store/docs/clean/manifests").glob("*/*.json"))

    def raced(store: Store, *place: str) -> Any:
        former.unlink(missing_ok=True)
        return opened(store, *place)

    monkeypatch.setattr(Store, "opened", raced)
    assert counts(gc(made), "clean") == (0, 0, 0, 0)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(made, monkeypatch):
    """What a manifest in it names would be taken for garbage."""
    scandir = os.scandir

    def broken(path: Any) -> Any:
        if str(path).endswith("manifests/~unpartitioned"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(vd.errors.StoreError, match="cannot be listed: PermissionError"):
        gc(made, 8)


def test_what_led_to_a_manifest_in_force_is_kept(made):
    """`long` was made from the second `clean`, which is not in force any more."""
    run(made, "trim(text)", "clean")
    gc(made, 8)
    gc(made, 20)
    assert files(made) == (2, 2)
    upstream = store(made).in_force("docs", "long", None).upstream["clean"]
    assert [*(made / "store/docs/clean/manifests").glob(f"*/{upstream}")]


def stage(root: Path, text: str) -> None:
    """Stage a part, as a run does that is killed before it publishes."""
    planned = plan(docs(root, text), store(root))
    (key,) = planned.partitions[0].stages["out"].keys
    schema = planned.partitions[0].schemas["out"]
    publisher = docs(root)["out"].spec.publisher(None)
    write_part(schema.empty_table(), PartTarget(publisher.staging, key, "id"))


def test_staged_parts_of_killed_runs_are_built_on_until_they_are_condemned(made):
    assert missing(plan(docs(made, "trim(text)"), store(made)))["out"] == 1
    stage(made, "trim(text)")
    (published,) = (made / "out").glob("*.parquet")
    half = staged(made)[0].with_name(".writing-00ff")
    half.write_bytes(b"half a part")
    notes = made / "out/_vane_staging_of_others/notes.txt"
    notes.parent.mkdir()
    notes.write_text("of somebody else")
    assert "out" not in missing(plan(docs(made, "trim(text)"), store(made)))

    assert counts(gc(made), "out") == (0, 0, 0, 0)
    assert counts(gc(made, 8), "out") == (1, 0, 1, 1)
    assert (len(staged(made)), half.exists()) == (1, False)
    condemned = json.loads((made / "store/docs/out/condemned.json").read_bytes())
    assert condemned.keys() == {f"_vane_staging/{path.stem}" for path in staged(made)}
    staged(made)[0].with_suffix("").write_bytes(b"a part as earlier releases have named it")
    assert missing(plan(docs(made, "trim(text)"), store(made)))["out"] == 1, "it may go any moment"

    assert counts(gc(made, 9.1), "out") == (0, 2, 0, 0)
    assert not staged(made)
    assert published.exists()
    assert notes.exists()
    assert counts(gc(made, 100), "out") == (0, 0, 0, 0)
    assert not (made / "store/docs/out/condemned.json").exists()


def test_a_target_that_cannot_be_read_is_told_and_passed_over(made):
    stage(made, "trim(text)")
    gc(made, 8)
    before = (made / "store/docs/out/condemned.json").read_bytes()
    kept = made / "store/docs/out/target.json"
    kept.write_text('{"url": "nosuch://lake/x", "publisher": "parquet"}')
    found = gc(made, 10)["docs/out"]
    assert "has no file system" in found.unreadable["nosuch://lake/x"]
    assert (made / "store/docs/out/condemned.json").read_bytes() == before
    result = CliRunner().invoke(main, ["store", "gc", str(made / "store")])
    assert result.exit_code == 0
    assert "docs/out: passed over the target 'nosuch://lake/x'" in result.output

    kept.write_text("{}")
    with pytest.raises(
        vd.errors.StoreError, match=r"target.json' is not readable: 'url'. Delete it"
    ):
        gc(made, 10)


def test_the_target_is_kept_before_anything_is_staged(tmp_path, monkeypatch):
    write_source(tmp_path / "src", pa.table({"id": [1], "text": ["A"]}))

    def gone(*args: object) -> None:
        raise OSError("the machine went away")

    monkeypatch.setattr(Store, "keep_target", gone)
    with pytest.raises(OSError, match="the machine went away"):
        run(tmp_path)
    assert not staged(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--keep", "week"], "'week' is not a duration; expected a number with s, m, h or d"),
        (["x", "--keep", "7"], "'7' is not a duration; expected a number with s, m, h or d"),
        (["/tmp/nothing-of-the-kind"], "holds no stage of any pipeline; is it a store's root?"),
        (["src"], "'src' holds no stage of any pipeline; is it a store's root?"),
    ],
)
def test_command_refuses(tmp_path, monkeypatch, arguments, words):
    (tmp_path / "src" / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["store", "gc", *arguments])
    assert result.exit_code in (1, 2)
    assert words in result.output


def test_batches_go_after_their_answers_were_kept_and_never_in_flight(made):
    folder, now = BatchFolder(store(made), "docs", "clean"), time.time()
    for name, ended_at in (("old", now - 9 * DAY), ("new", now - DAY), ("open", 0.0)):
        batch = ProviderBatch("m", now, "r", 1, (None,), ("clean",), ended_at=ended_at, name=name)
        folder.add(batch, {"0" * 32: "{}"})
        if ended_at:
            folder.end(batch, {})
    killed = record_requests(folder.path, {"0" * 32: "{}"}).name
    list(collect(store(made), GcPolicy(now, 7 * DAY, DAY)))
    kept = {"new.answers.parquet", "new.json", "open.json", "open.requests.parquet"}
    assert folder.path.names().keys() == {*kept, killed}
    list(collect(store(made), GcPolicy(now + 8.1 * DAY, 7 * DAY, DAY)))
    assert folder.path.names().keys() == {"open.json", "open.requests.parquet"}
