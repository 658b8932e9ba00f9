"""Every edit that can change a result changes the identity; the needless changes are counted.

The edits stand in the modules ``support.edits_*``, by what they have in common.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator

import pytest

from support.edits import Edit, Project
from support.paths import SUPPORT

EDITS: list[Edit] = [
    edit
    for path in sorted(SUPPORT.glob("edits_*.py"))
    for edit in importlib.import_module(f"support.{path.stem}").EDITS
]

UNDETECTED = {
    "attack: base made by own factory instance",
    "attack: future annotations added",
    "file: a path as bytes",
    "import: a file is written",
    "syntax: import: Hydra's target",
}
"""Limits that the docstring of `vane_dagster/fingerprint/code.py` names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("edits") / "project")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(project.root))
        patched.setattr(sys, "dont_write_bytecode", True)
        yield project


@pytest.fixture
def project(folder: Project) -> Iterator[Project]:
    folder.root.mkdir()
    yield folder
    folder.forget()
    shutil.rmtree(folder.root)


@pytest.mark.parametrize("edit", EDITS, ids=[edit.name for edit in EDITS])
def test_edit(edit: Edit, project: Project, record_property) -> None:
    outcome = edit.outcome(project)
    if edit.name in UNDETECTED:
        assert outcome == "kept", (
            "no longer a limit: remove it here and in vane_dagster/fingerprint/code.py"
        )
    elif edit.changes:
        assert outcome in ("changed", "refused"), "stale: old rows would be taken for new ones"
    elif edit.needless:
        assert outcome != "kept", "no longer a limit: drop `needless`"
    else:
        assert outcome == "kept"
    record_property("outcome", outcome)


def test_names_are_unique() -> None:
    names = [edit.name for edit in EDITS]
    assert len(set(names)) == len(names)
