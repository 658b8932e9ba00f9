"""Imports within the package: their order, and that files do not import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import vane_dagster
from vane_dagster.fingerprint.code_strings import syntax_tree

ROOT = Path(vane_dagster.__file__).parent
ORDER = [
    "_lazy", "_failpoints", "_secrets", "_texts", "errors", "retries", "_home", "_arguments",
    "_keywords", "_private_folder", "_worker_process", "types", "servers", "providers",
    "fingerprint", "storage", "_user_errors", "sources",
    "checks", "pipeline", "planning", "worker", "events", "compute", "engine", "tracing",
    "orchestration", "cli", "testing",
]  # fmt: skip


def module_names(root: Path) -> dict[str, Path]:
    """The package's files by the names of their modules, without ``vane_dagster.``."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.AST, known: Container[str], hints: bool = True) -> Iterator[str]:
    """The package's modules that a file imports anywhere, in functions too.

    Args:
        tree: The file's syntax tree.
        known: The package's modules.
        hints: Whether imports for type checkers alone count.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not hints:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vane_dagster."):
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            package, _, module = (node.module or "").partition(".")
            for alias in node.names if package == "vane_dagster" else ():
                inner = f"{module}.{alias.name}".removeprefix(".")
                yield inner if inner in known else module
        else:
            yield from imports(node, known, hints)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph; empty if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph[node]):
            if found := walk(following, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in graph if (found := walk(node, []))), [])


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    """The syntax trees of the package's files."""
    return {name: syntax_tree(file.read_text()) for name, file in module_names(ROOT).items()}


@pytest.fixture(scope="module")
def graph(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    """The modules that each module imports when it is imported or when its functions run."""
    return {
        name: set(imports(tree, trees, hints=False)) - {"", name} for name, tree in trees.items()
    }


def test_each_module_belongs_to_a_layer():
    top = {name.partition(".")[0] for name in module_names(ROOT)}
    assert top - {"", "__main__"} == set(ORDER)


def test_imports_go_one_way(trees):
    wrong = set()
    for name, tree in trees.items():
        own = name.partition(".")[0]
        if own not in ORDER:
            continue
        for imported in imports(tree, trees):
            above = imported.partition(".")[0]
            if above and ORDER.index(above) > ORDER.index(own):
                wrong.add(f"{name} imports {imported}")
    assert wrong == set()


def test_the_driver_imports_only_records_of_the_worker_package(graph):
    """`compute` also starts workers, and knows their classes."""
    records = {f"worker.{name}" for name in ("protocol", "reports", "pools", "calls")}
    driver = ("planning", "events", "engine", "tracing", "orchestration", "cli")
    imported = {
        f"{name} imports {module}"
        for name, modules in graph.items()
        if name.partition(".")[0] in driver
        for module in modules
        if module.partition(".")[0] == "worker" and module not in records
    }
    assert imported == set()


def test_no_files_import_each_other_in_a_circle(graph):
    assert circle(graph) == []
