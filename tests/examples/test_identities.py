"""Which statements of the demo and of the examples count in the identity of their stages."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from support.paths import REPOSITORY
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.modules import Finder


class Statement(NamedTuple):
    """A top-level statement, and where it is."""

    path: Path
    index: int
    node: ast.stmt


def statements(*files: Path) -> list[Statement]:
    """Returns the top-level statements of files, without docstrings."""
    return [
        Statement(path, index, node)
        for path in files
        for index, node in enumerate(ast.parse(path.read_text()).body)
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def changing(module: str, name: str, statements: list[Statement]) -> list[Statement]:
    """Returns the statements of which an edit changes an identity.

    Those whose edits change nothing together are not edited one by one.
    """
    if digest(module, name) == digest(module, name, statements):
        return []
    half = len(statements) // 2
    if not half:
        return statements
    return changing(module, name, statements[:half]) + changing(module, name, statements[half:])


def digest(module: str, name: str, edited: Sequence[Statement] = ()) -> str:
    """Returns the identity of a name while statements are edited.

    Nothing is imported: a statement that is edited blindly could not be.
    """
    texts = {statement.path: statement.path.read_text() for statement in edited}
    for path, text in texts.items():
        tree = ast.parse(text)
        for statement in edited:
            if statement.path == path:
                edit_statement(tree.body[statement.index])
        path.write_text(ast.unparse(tree))
    finder = Finder()
    found = finder.find(module)
    assert found is not None
    dependency_walk = DependencyWalk(finder, found)
    dependency_walk.name(found, name)
    result = "".join(dependency_walk.parts().values())
    for path, text in texts.items():
        path.write_text(text)
    return result


def edit_statement(node: ast.stmt) -> None:
    """Makes a statement say something else."""
    if isinstance(node, ast.Import):
        node.names = [ast.alias(f"{alias.name}.edited", alias.asname) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        node.names = [ast.alias("edited", alias.asname or alias.name) for alias in node.names]
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)) and node.value is not None:
        node.value = ast.Tuple([node.value, ast.Constant("edited")])
    else:
        inner = node.body  # type: ignore[attr-defined]  # a definition, a block
        inner.insert(0, ast.parse("edited = 1").body[0])


def bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {node.id for node in found if isinstance(node.ctx, ast.Store)}


def test_only_the_embedders_own_statements_of_the_demo_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(REPOSITORY / "definitions", tmp_path / "definitions")
    for name in [name for name in sys.modules if name.partition(".")[0] == "definitions"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "definitions"
    stage = "definitions.embedder", "SentenceEmbedder"
    own, others = folder / "embedder.py", set(folder.rglob("*.py")) - {folder / "embedder.py"}
    assert changing(*stage, statements(*others)) == []
    found = changing(*stage, statements(own))
    names = set().union(*(bound_names(each.node) for each in found))
    assert {"SentenceEmbedder", "np", "os"} <= names
    assert {"DIMENSIONS", "SCHEMA"}.isdisjoint(names)


@pytest.mark.parametrize(
    ("example", "name", "own"),
    [
        ("async_api", "Translator", {"Translator", "ENVIRONMENT"}),
        ("checks", "rate", {"rate", "GOOD"}),
        ("chunks", "embed", {"embed", "vectorizer"}),
        ("cpu_preprocess", "Urgency", {"Urgency"}),
        ("own_provider", "HouseModel", {"HouseModel"}),
        ("partitioned", "Anomaly", {"Anomaly"}),
        ("prompt_pre_and_postprocess", "preprocess", {"preprocess", "TONES"}),
        ("prompt_pre_and_postprocess", "postprocess", {"postprocess", "Reply"}),
        ("sklearn_function", "classify", {"classify", "load_model", "MEASURES"}),
        ("torch_numpy", "Predictor", {"Predictor", "make_net"}),
        ("two_models", "Classifier", {"Classifier", "Embedder", "GPUS", "MODEL"}),
    ],
)
def test_only_a_stages_own_statements_of_an_example_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, name: str, own: set[str]
) -> None:
    copied = shutil.copy(
        REPOSITORY / "examples" / f"{example}.py", tmp_path / f"copied_{example}.py"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = f"copied_{example}", name
    names = {
        each: bound_names(each.node) or {"ENVIRONMENT"}
        for each in statements(copied)
        if not isinstance(each.node, (ast.Import, ast.ImportFrom))
    }
    found = changing(*stage, [each for each in names if names[each] & own])
    found += changing(*stage, [each for each in names if not names[each] & own])
    assert set().union(*(names[each] for each in found)) == own
