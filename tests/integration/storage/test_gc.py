"""Parts that nobody needs are removed, and never one that somebody does."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import dagster as dg
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import materializing, metadata
from support.snapshots import Snapshot
from vane_dagster.cli.main import main
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.gc import GcPolicy, GcReport, collect
from vane_dagster.storage.store import Store

DAY = 86_400.0
KEEP = 7 * DAY
GRACE = DAY


def docs(root: Path, text: str = "lower(text)", **fragments: int) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(root / "src")), id="id", **fragments)
    clean = pipeline.project("clean", {"id": "id", "text": text})
    clean.project("long", {"length": "length(text)"})
    return pipeline


@pytest.fixture(scope="module")
def once_made(tmp_path_factory, local):
    folder = tmp_path_factory.mktemp("made") / "root"
    write_source(folder / "src", {"id": [1, 2, 3], "text": ["A", "Bb", "Ccc"]})
    materializing(folder)(docs(folder), local)
    materializing(folder)(docs(folder, "upper(text)"), local)
    return Snapshot(folder)


@pytest.fixture
def made(once_made):
    """A store that holds two versions of both stages."""
    return once_made.restore()


@pytest.fixture
def again(made):
    """Materializes what is in that store: ``again(pipeline)``."""
    return materializing(made)


def gc(root: Path, days: float = 0.0, **terms) -> dict[str, GcReport]:
    """Collects as if some days had passed."""
    given = {"now": time.time() + days * DAY, "keep": KEEP, "grace": GRACE, **terms}
    return {f.stage: f for f in collect(Store(Location(str(root / "store"))), GcPolicy(**given))}


def counts(found: Mapping[str, GcReport]) -> dict[str, tuple[int, int, int, int]]:
    return {
        stage: (len(f.condemned), len(f.deleted), len(f.manifests), len(f.temporaries))
        for stage, f in found.items()
    }


LOWER = ["a", "bb", "ccc"]
NOTHING = {"docs/clean": (0, 0, 0, 0), "docs/long": (0, 0, 0, 0)}


def files(root: Path, stage: str) -> tuple[int, int]:
    folder = root / "store" / "docs" / stage
    parts = list(folder.glob("parts/*/*.parquet"))
    return len(parts), len(list(folder.glob("manifests/*/*.json")))


def texts(root: Path) -> list[str]:
    return read_stage(root / "store", "docs", "clean")["text"].to_pylist()


def gone(*args: object) -> None:
    raise OSError("the machine went away")


def test_former_versions_go_in_two_steps(made, again, local):
    assert files(made, "clean") == (2, 2)
    assert counts(gc(made)) == NOTHING

    assert counts(gc(made, 8))["docs/clean"] == (1, 0, 1, 0)
    assert files(made, "clean") == (2, 1)
    assert counts(gc(made, 8.5))["docs/clean"] == (1, 0, 0, 0), "the grace period is not over"

    assert counts(gc(made, 9.1))["docs/clean"] == (0, 1, 0, 0)
    assert files(made, "clean") == (1, 1)
    assert files(made, "long") == (1, 1)
    assert texts(made) == ["A", "BB", "CCC"]
    result = again(docs(made, "upper(text)"), local)
    assert metadata(result, "clean")["fragments_computed"] == 0
    assert counts(gc(made, 100)) == NOTHING
    assert not (made / "store/docs/clean/condemned.json").exists()


def test_condemned_parts_are_not_built_on(made, again, local):
    """The plan may not rely on a part that the next collection deletes."""
    gc(made, 8)
    result = again(docs(made), local)
    assert metadata(result, "clean")["fragments_computed"] == 1
    assert files(made, "clean")[0] == 3, "the same rows in another file than the condemned one"
    gc(made, 10)
    assert texts(made) == LOWER


def test_a_plan_made_while_parts_are_deleted_does_not_build_on_them(
    made, again, local, monkeypatch
):
    gc(made, 8)
    delete = Location.delete

    def late(location: Location, names: list[str]) -> None:
        if "/clean/parts/" in location.url:
            result = again(docs(made), local)
            assert metadata(result, "clean")["fragments_computed"] == 1
        delete(location, names)

    monkeypatch.setattr(Location, "delete", late)
    assert counts(gc(made, 10))["docs/clean"][1] == 1
    monkeypatch.undo()
    assert texts(made) == LOWER
    assert counts(gc(made)) == NOTHING
    assert not (made / "store/docs/clean/condemned.json").exists()


def test_a_manifest_that_goes_while_it_is_read_is_passed_over(made, monkeypatch):
    opened = Store.opened
    former = min((made / "store/docs/clean/manifests").glob("*/*.json"))

    def raced(store: Store, location: Location, name: str):
        former.unlink(missing_ok=True)
        return opened(store, location, name)

    monkeypatch.setattr(Store, "opened", raced)
    assert counts(gc(made)) == NOTHING


def test_a_folder_that_cannot_be_listed_is_no_empty_one(made, monkeypatch):
    """What a manifest in it names would be taken for garbage."""
    scandir = os.scandir

    def broken(path):
        if str(path).endswith("manifests/~unpartitioned"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(vd.errors.StoreError, match="cannot be listed: PermissionError"):
        gc(made, 8)


def test_a_part_that_is_named_again_is_released(made, again, local):
    """A run that planned before the condemnation, and committed after it."""
    gc(made, 8)
    (made / "store/docs/clean/condemned.json").rename(made / "kept.json")
    assert metadata(again(docs(made), local), "clean")["fragments_reused"] == 1
    (made / "kept.json").rename(made / "store/docs/clean/condemned.json")

    assert counts(gc(made, 10))["docs/clean"][1] == 0
    assert texts(made) == LOWER
    assert read_stage(made / "store", "docs", "long").num_rows == 3


def test_a_part_that_a_run_commits_during_a_collection_is_not_condemned(
    made, again, local, monkeypatch
):
    entries = Location.entries

    def late(location: Location):
        if location.url.endswith("/clean/parts/~unpartitioned"):
            result = again(docs(made), local, select=["clean"])
            assert metadata(result, "clean")["fragments_reused"] == 1
        return entries(location)

    monkeypatch.setattr(Location, "entries", late)
    assert counts(gc(made, 8))["docs/clean"] == (0, 0, 1, 0)
    monkeypatch.undo()
    assert texts(made) == LOWER


def test_unfinished_work_is_kept_for_its_time(made, again, local):
    """Parts that no manifest names yet are what a killed run left for the next."""
    folder = made / "store/docs/clean"
    shutil.rmtree(folder / "manifests")
    shutil.rmtree(made / "store/docs/long")
    assert counts(gc(made, 6)) == {"docs/clean": (0, 0, 0, 0)}
    assert metadata(again(docs(made), local), "clean")["fragments_reused"] == 1


def test_what_led_to_a_manifest_in_force_is_kept(made, again, local):
    """`long` was made from the first `clean`, which is not in force any more."""
    write_source(made / "src", {"id": [1, 2], "text": ["A", "B"]})
    again(docs(made, "trim(text)"), local, select=["clean"])
    gc(made, 8)
    gc(made, 20)
    manifest = json.loads(next((made / "store/docs/long/manifests").glob("*/*.json")).read_bytes())
    upstream = manifest["upstream"]["clean"]
    (named,) = (made / "store/docs/clean/manifests").glob(f"*/{upstream}")
    (part,) = json.loads(named.read_bytes())["parts"]
    name = f"{part['key']}-{part['digest']}.parquet"
    assert list((made / "store/docs/clean/parts").glob(f"*/{name}"))
    assert files(made, "clean") == (2, 2)


def test_what_killed_writers_left_is_removed(made):
    folder = next((made / "store/docs/clean/parts").iterdir())
    (folder / ".writing-00ff").write_bytes(b"half a part")
    (folder / "notes.txt").write_text("of somebody else")
    assert counts(gc(made, 1))["docs/clean"] == (0, 0, 0, 0)
    assert counts(gc(made, 8))["docs/clean"] == (1, 0, 1, 1)
    assert sorted(p.suffix for p in folder.iterdir()) == [".parquet", ".parquet", ".txt"]


# What is staged in the targets of write stages


def publishing(root: Path, text: str = "text", **written) -> vd.Pipeline:
    """As `docs`, in partitions, and published."""
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{root}/src/{{partition_key}}"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["a", "b"]),
    )
    place = f"{root}/out" if written.get("format") == "delta" else f"{root}/out/{{partition_key}}/x"
    pipeline.project("clean", {"text": text}).write("out", place, **grouped(written))
    return pipeline


def staged(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("out/**/_vane_staging/**/*") if path.is_file())


@pytest.fixture(scope="module", params=["parquet", "merged", "delta"])
def once_killed(request, tmp_path_factory, local):
    root = tmp_path_factory.mktemp("killed") / "root"
    materialize = materializing(root)
    given = {"format": "delta"} if request.param == "delta" else {}
    given |= {"target_file_bytes": 5000} if request.param == "merged" else {}
    for key in "ab":
        write_source(root / "src" / key, {"id": [1, 2, 3], "text": ["A", "Bb", "Ccc"]})
    materialize(publishing(root, **given), local, partition="a")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "announce", gone)
        for key in "ab":
            pipeline = publishing(root, "upper(text)", **given)
            assert not materialize(pipeline, local, partition=key, raises=False).success
    assert len(staged(root)) == 2
    return Snapshot(root), given


@pytest.fixture
def killed(once_killed):
    """A store whose partition "a" was published, and a run that ended with its parts staged."""
    snapshot, given = once_killed
    return snapshot.restore(), given


def test_staged_parts_of_killed_runs_go_in_two_steps(killed):
    """At once with what a killed writer left; files of others stay."""
    root, _ = killed
    published = {path for path in (root / "out").rglob("*") if path.is_file()} - {*staged(root)}
    assert counts(gc(root))["docs/out"] == (0, 0, 0, 0)

    half = staged(root)[0].with_name(".writing-00ff")
    half.write_bytes(b"half a part")
    notes = root / "out/_vane_staging_of_others/notes.txt"
    notes.parent.mkdir()
    notes.write_text("of somebody else")
    published.add(notes)
    assert counts(gc(root, 8))["docs/out"] == (2, 0, 0, 1)
    assert not half.exists()
    assert len(staged(root)) == 2
    condemned = json.loads((root / "store/docs/out/condemned.json").read_bytes())
    assert condemned.keys() == {f"_vane_staging/{path.name}" for path in staged(root)}
    assert counts(gc(root, 8.5))["docs/out"] == (2, 0, 0, 0), "the grace period is not over"

    assert counts(gc(root, 9.1, dry_run=True))["docs/out"] == (0, 2, 0, 0)
    assert len(staged(root)) == 2
    assert counts(gc(root, 9.1))["docs/out"] == (0, 2, 0, 0)
    assert not staged(root)
    assert {path for path in (root / "out").rglob("*") if path.is_file()} == published
    assert counts(gc(root, 100))["docs/out"] == (0, 0, 0, 0)
    assert not (root / "store/docs/out/condemned.json").exists()


def test_staged_parts_are_built_on_until_they_are_condemned(killed, local):
    root, given = killed
    materialize = materializing(root)
    result = materialize(publishing(root, "upper(text)", **given), local, partition="a")
    assert metadata(result, "out")["fragments_reused"] == 1

    gc(root, 8)
    result = materialize(publishing(root, "upper(text)", **given), local, partition="b")
    assert metadata(result, "out")["fragments_computed"] == 1, "it may be deleted at any moment"
    gc(root, 10)
    if given.get("format") == "delta":
        read = DeltaTable(root / "out").to_pyarrow_table()
    else:
        read = ds.dataset(root / "out").to_table()
    assert sorted(read["text"].to_pylist()) == ["A", "A", "BB", "BB", "CCC", "CCC"]
    assert counts(gc(root, 100))["docs/out"][:2] == (0, 0)


def test_a_target_that_cannot_be_read_is_told_and_passed_over(killed):
    root, _ = killed
    gc(root, 8)
    before = (root / "store/docs/out/condemned.json").read_bytes()
    kept = root / "store/docs/out/target.json"
    kept.write_text('{"url": "nosuch://lake/x", "publisher": "parquet"}')
    found = gc(root, 10)["docs/out"]
    assert "has no file system" in found.unreadable["nosuch://lake/x"]
    assert (root / "store/docs/out/condemned.json").read_bytes() == before
    result = CliRunner().invoke(main, ["store", "gc", str(root / "store")])
    assert result.exit_code == 0
    assert "docs/out: passed over the target 'nosuch://lake/x'" in result.output

    kept.write_text("{}")
    with pytest.raises(
        vd.errors.StoreError, match=r"target.json' is not readable: 'url'. Delete it"
    ):
        gc(root, 10)


def test_the_target_is_kept_before_anything_is_staged(tmp_path, local, materialize, monkeypatch):
    write_source(tmp_path / "src/a", {"id": [1], "text": ["A"]})
    monkeypatch.setattr(Store, "keep_target", gone)
    with pytest.raises(Exception, match="the machine went away"):
        materialize(publishing(tmp_path), local, partition="a")
    assert not staged(tmp_path)


# The command


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["store", "gc", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_command(made):
    store = str(made / "store")
    assert run(store) == "Nothing to remove in 2 stages.\n"
    for path in (made / "store").rglob("*.*"):
        os.utime(path, (time.time() - 30 * DAY,) * 2)
    output = run(store, "--dry-run", "--verbose")
    assert "docs/clean: would have deleted 1 former manifest (" in output
    assert ", marked 1 part (" in output
    assert f"  would have marked {store}/docs/clean/parts/~unpartitioned/" in output
    assert files(made, "clean") == (2, 2)
    assert "docs/clean: deleted 1 former manifest (" in run(store)
    assert "docs/clean: deleted 1 part (" in run(store, "--grace", "0s")
    assert files(made, "clean") == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--keep", "week"], "'week' is no duration; expected a number with s, m, h or d"),
        (["x", "--storage-options", "[1]"], "expected a JSON object"),
        (["/tmp/nothing-of-the-kind"], "holds no stage of any pipeline; is it a store's root?"),
        (["src"], "'src' holds no stage of any pipeline; is it a store's root?"),
    ],
)
def test_command_refuses(made, monkeypatch, arguments, words):
    (made / "src" / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(made)
    result = CliRunner().invoke(main, ["store", "gc", *arguments])
    assert result.exit_code in (1, 2)
    assert words in result.output
