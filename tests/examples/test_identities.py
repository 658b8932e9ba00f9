"""Which statements of the demo and of the examples count in the identity of their stages."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.code_project import DEFS, HELPERS, defs, project  # noqa: F401  # fixtures
from support.paths import REPOSITORY
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.modules import Finder


def changed_statements(folder: Path, module: str, name: str) -> Iterator[tuple[str, ast.stmt]]:
    """Edits each top-level statement below a folder; yields those that change an identity.

    Nothing is imported: a statement that is edited blindly could not be.
    """

    def digest() -> str:
        finder = Finder()
        found = finder.find(module)
        assert found is not None
        dependency_walk = DependencyWalk(finder, found)
        dependency_walk.name(found, name)
        return dependency_walk.digest()

    before = digest()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        for index, statement in enumerate(ast.parse(text).body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            tree = ast.parse(text)
            edit_statement(tree.body[index])
            path.write_text(ast.unparse(tree))
            if digest() != before:
                yield path.name, statement
            path.write_text(text)
    assert digest() == before


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
    found = list(changed_statements(folder, "definitions.embedder", "SentenceEmbedder"))
    assert {file for file, _ in found} == {"embedder.py"}
    names = set().union(*(bound_names(statement) for _, statement in found))
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
        ("sklearn_function", "classify", {"classify", "load_model", "MEASURES"}),
        ("torch_numpy", "Predictor", {"Predictor", "make_net"}),
        ("two_models", "Classifier", {"Classifier", "Embedder"}),
    ],
)
def test_only_a_stages_own_statements_of_an_example_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, name: str, own: set[str]
) -> None:
    shutil.copy(REPOSITORY / "examples" / f"{example}.py", tmp_path / f"copied_{example}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = changed_statements(tmp_path, f"copied_{example}", name)
    names = {
        bound
        for _, statement in found
        if not isinstance(statement, (ast.Import, ast.ImportFrom))
        for bound in bound_names(statement) or {"ENVIRONMENT"}
    }
    assert names == own
