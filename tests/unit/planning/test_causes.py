"""Why a stage is not up to date, as a plan says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import write_source
from support.edits import Project
from support.in_process import InProcess, executed
from support.plans import docs, plan, settle, source, triple
from vane_dagster.events import Failed
from vane_dagster.planning.causes import changed, describe
from vane_dagster.planning.definition import components
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.store import Store


@pytest.fixture
def store(tmp_path: Path, store: Store) -> Store:
    source(tmp_path, {"a.parquet": 3, "b.parquet": 3})
    settle(plan(docs(tmp_path), store), store)
    return store


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store(StoragePath(str(tmp_path / "empty")))


def found(tmp_path: Path, store: Store, **edits: Any) -> dict[str, dict[str, int]]:
    options = {key: edits.pop(key) for key in ("force", "retry_quarantined") if key in edits}
    return found_in(plan(docs(tmp_path, **edits), store, **options))


def found_in(planned: RunPlan) -> dict[str, dict[str, int]]:
    assert not planned.failed, planned.failed
    stages = planned.partitions[0].stages
    return {name: dict(each.causes) for name, each in stages.items() if each.causes}


BELOW = {
    "joined": {"upstream stage 'doubled' changed": 1},
    "out": {"upstream stage 'joined' changed": 1},
}


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        ({"fn": triple}, "code of double is no longer used"),
        ({"fn_kwargs": {"by": 3}}, "argument \"fn_kwargs['by']\" is now used"),
        ({"columns": ["id", "n"]}, "option 'columns' changed"),
        ({"keyed_env_vars": ["HOME"]}, "environment variable 'HOME' is now used"),
    ],
)
def test_an_edit_is_named_and_downstream_stages_name_their_upstream(tmp_path, store, edit, cause):
    causes = found(tmp_path, store, **edit)
    assert cause in causes.pop("doubled")
    assert causes == BELOW


def test_only_what_changed_is_named(tmp_path, store):
    assert found(tmp_path, store) == {}
    assert found(tmp_path, store, factor=4)["scaled"] == {
        "argument \"fn_constructor_kwargs['factor']\" changed": 1
    }
    assert found(tmp_path, store, text="upper(text)")["clean"] == {"column 'text' changed": 1}
    assert found(tmp_path, store, where="n > 0")["clean"] == {"option 'where' changed": 1}
    assert found(tmp_path, store, out="other")["out"] == {"option 'target' changed": 1}


def test_an_argument_with_a_local_file_is_named_with_it(tmp_path):
    def declared(content: str) -> Sequence[Component]:
        file = tmp_path / "weights.pt"
        file.write_text(content)
        pipeline = vd.Pipeline("docs", source=vd.parquet("rows.parquet"), id="id")
        given: Any = {"schema": {"y": "BIGINT"}, "fn_constructor_args": [vd.local_file(file)]}
        return components(pipeline, pipeline.map_batches("out", Loaded, **given).spec)

    argument = "argument 'fn_constructor_args (weights.pt)'"
    assert changed(declared("1"), declared("2")) == {argument: "changed"}


class Loaded:
    def __init__(self, weights: str) -> None: ...

    def __call__(self, batch: Any) -> Any:
        return batch


ASKED = (
    "from pydantic import BaseModel\nfrom words import short\n"
    "class Facts(BaseModel):\n    n: int\n"
    "def asked(row):\n    return short(row['text'])\n"
)


@pytest.mark.parametrize(
    ("file", "old", "new", "cause"),
    [
        ("words.py", "9", "8", "code of words.short"),
        ("defs.py", "n: int", "n: float", "code of Facts"),
        ("defs.py", "row['text']", "'a'", "code of asked"),
        ("", "model", "other", "option 'model'"),
        ("", "provider", "anthropic", "option 'provider'"),
    ],
)
def test_a_prompt_names_what_was_edited(tmp_path, monkeypatch, file, old, new, cause):
    project = Project(tmp_path)
    project.write(defs=ASKED, words="def short(text):\n    return text[:9]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def declared(**given: str) -> Sequence[Component]:
        pipeline = vd.Pipeline("docs", source=vd.parquet("rows.parquet"), id="id")
        function, form = project.load("asked"), project.load("Facts")
        stage = pipeline.prompt(
            "out", function, return_format=form, **{"provider": "openai", "model": "m", **given}
        )
        return components(pipeline, stage.spec)

    before = declared()
    if file:
        project.edit(file, old, new)
    assert changed(before, declared(**({} if file else {old: new}))) == {cause: "changed"}
    project.forget()


def test_files_are_counted(tmp_path, store):
    source(tmp_path, {"b.parquet": 4, "c.parquet": 1, "d.parquet": 1})
    os.remove(tmp_path / "src" / "a.parquet")
    causes = found(tmp_path, store)
    assert causes["clean"] == {"new files": 2, "changed files": 1, "removed files": 1}
    assert causes["doubled"] == {"upstream stage 'clean' changed": 1}


def test_a_table_of_memory_has_rows_and_no_files(tmp_path):
    store = Store(StoragePath(str(tmp_path / "store")))

    def planned(rows):
        pipeline = vd.Pipeline("docs", source=vd.table(rows), id="id")
        pipeline.project("all", ["id"])
        return plan(pipeline, store)

    settle(planned([{"id": 1}]), store)
    causes = planned([{"id": 1}, {"id": 2}]).partitions[0].stages["all"].causes
    assert causes == {"rows of the source changed": 1}


def test_other_causes(tmp_path, store, empty):
    assert all(causes == {"force": 1} for causes in found(tmp_path, store, force=True).values())
    cut = {"the source's options or fragment_rows changed": 1}
    assert found(tmp_path, store, fragment_rows=2)["clean"] == cut
    assert found(tmp_path, empty)["doubled"] == {"not computed before": 1}
    for stage in ("doubled", "clean"):
        folder = store.parts("docs", stage, None)
        folder.delete([next(name for name in folder.names() if name.endswith(".parquet"))])
        causes = found(tmp_path, store, factor=4)  # so that the partition is planned
        assert causes[stage] == {"stored parts are missing": 1}


def test_a_partition_that_a_run_gave_up_is_due_for_that_reason(tmp_path, empty):
    def refuse(row: int) -> int:
        raise ValueError(row)

    source(tmp_path, {"a.parquet": 3})
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.map("no", refuse, columns={"row": "n"}, schema="BIGINT", on_error="quarantine")
    events = executed(pipeline, empty, [None], InProcess())
    assert [each.stage for each in events if isinstance(each, Failed)] == ["no"]
    assert found_in(plan(pipeline, empty)) == {"no": {"a run that failed did not commit it": 1}}


def test_a_column_of_a_new_file_that_has_another_type_is_named(tmp_path, store):
    write_source(tmp_path / "src", {"id": ["x"], "n": [0.5], "text": ["x"]}, "c.parquet")
    causes = found(tmp_path, store)["clean"]
    assert causes == {"new files": 1, "column 'n' changed from BIGINT to DOUBLE": 1}


def test_causes_of_many_partitions_fit_in_a_line():
    due = {key: Counter({"code of f changed": 1}) for key in "abcdefghij"}
    due["b"] += Counter({"new files": 1200})
    for key in "cdef":
        due[key]["upstream stage 'a' changed"] = 1
    assert describe(due, 10) == (
        "1,200 new files in 1 partition (b), code of f changed, "
        "upstream stage 'a' changed in 4 partitions (c, d, e and 1 more)"
    )
    assert describe({"a": {"force": 1}}, 2) == "force in 1 partition (a)"
    many = {f"option {n} changed": 1 for n in range(9)}
    assert describe({None: many}, 1).endswith("option 4 changed and 4 more")
    assert describe({None: {"removed files": 1}}, 1) == "1 removed file"
