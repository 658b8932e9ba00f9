"""`vane-dagster store gc` between the runs of a pipeline that publishes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.cli.main import main
from vane_dagster.storage.store import Store

FORMATS = {"parquet": {}, "merged": {"target_file_bytes": 5000}, "delta": {"format": "delta"}}


def docs(root: Path, text: str) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet(f"{root}/src"), id="id")
    clean = docs.project("clean", {"text": text})
    for name, given in FORMATS.items():
        clean.write(name, f"{root}/{name}", **grouped(given))
    return docs


def collected(root: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["store", "gc", str(root / "store"), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def age(root: Path) -> None:
    for path in root.rglob("*.*"):
        os.utime(path, (time.time() - 30 * 86_400,) * 2)


def parts(root: Path) -> dict[str, int]:
    """The numbers of stored parts of `clean`, and of staged ones by target."""
    found = {name: [*root.glob(f"{name}/_vane_staging/**/*.parquet")] for name in FORMATS}
    found["clean"] = [*(root / "store/docs/clean/parts").rglob("*.parquet")]
    return {name: len(paths) for name, paths in found.items()}


def gone(*args: object) -> None:
    raise OSError("the machine went away")


def test_a_store_is_collected_between_runs(tmp_path, local, materialize):
    write_source(tmp_path / "src", {"id": [1, 2, 3], "text": ["A", "Bb", "Ccc"]})
    materialize(docs(tmp_path, "lower(text)"), local)
    materialize(docs(tmp_path, "upper(text)"), local)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "announce", gone)
        assert not materialize(docs(tmp_path, "text"), local, raises=False).success
    assert collected(tmp_path) == "Nothing to remove in 4 stages.\n"

    # A month later, the first collection marks what nobody needs.
    age(tmp_path)
    before = parts(tmp_path)
    assert before == {"clean": 3, "parquet": 1, "merged": 1, "delta": 1}
    output = collected(tmp_path, "--dry-run", "--verbose")
    assert "docs/clean: would have deleted 1 former manifest (" in output
    assert ", marked 1 part (" in output
    place = f"{tmp_path}/store/docs/clean/parts/~unpartitioned/"
    assert f"  would have marked {place}" in output
    assert "docs/clean: deleted 1 former manifest (" in collected(tmp_path)
    assert parts(tmp_path) == before

    # The next run does not build on it, and finishes what the killed one began.
    result = materialize(docs(tmp_path, "text"), local)
    assert metadata(result, "clean")["fragments_computed"] == 0
    assert {metadata(result, name)["fragments_computed"] for name in FORMATS} == {1}

    # The second collection deletes it.
    assert "docs/clean: deleted 1 part (" in collected(tmp_path, "--grace", "0s")
    assert parts(tmp_path) == {"clean": 2, "parquet": 0, "merged": 0, "delta": 0}
    expected = {"id": [1, 2, 3], "text": ["A", "Bb", "Ccc"]}
    assert read_stage(tmp_path / "store", "docs", "clean").to_pydict() == expected
    assert DeltaTable(tmp_path / "delta").to_pyarrow_table().to_pydict() == expected
    result = materialize(docs(tmp_path, "text"), local)
    assert {metadata(result, name)["fragments_computed"] for name in ("clean", *FORMATS)} == {0}
