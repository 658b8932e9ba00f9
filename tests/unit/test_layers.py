"""The package's files, and what they import: each other in an order, and declared libraries."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from importlib.metadata import files
from pathlib import Path

import pytest

import vane_dagster
from support.paths import REPOSITORY, TESTS
from vane_dagster.fingerprint.code_strings import syntax_tree

ROOT = Path(vane_dagster.__file__).parent
ORDER = [
    "_lazy", "_failpoints", "_secrets", "_texts", "errors", "retries", "_home",
    "_arguments", "_container", "_keywords", "_private_folder", "_worker_process", "types",
    "servers", "providers", "fingerprint", "storage", "_user_errors", "sources",
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


Import = ast.Import | ast.ImportFrom


def import_statements(
    body: Iterable[ast.AST], is_hint: bool = False
) -> Iterator[tuple[Import, bool]]:
    """The imports anywhere in a file, in functions too, and whether each is for types only."""
    for node in body:
        if isinstance(node, Import):
            yield node, is_hint
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            is_guard = getattr(getattr(node, "test", None), "id", "") == "TYPE_CHECKING"
            for name in ("body", "orelse", "handlers", "finalbody", "cases"):
                yield from import_statements(getattr(node, name, ()), is_hint or is_guard)


def imports(statements: Iterable[Import], known: Container[str]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vane_dagster."):
                    yield alias.name.partition(".")[2]
        else:
            assert node.level == 0, "a relative import"
            package, _, module = (node.module or "").partition(".")
            for alias in node.names if package == "vane_dagster" else ():
                inner = f"{module}.{alias.name}".removeprefix(".")
                yield inner if inner in known else module


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
def trees() -> dict[str, ast.Module]:
    return {name: syntax_tree(file.read_text()) for name, file in module_names(ROOT).items()}


@pytest.fixture(scope="module")
def statements(trees: dict[str, ast.Module]) -> dict[str, list[tuple[Import, bool]]]:
    return {name: [*import_statements(tree.body)] for name, tree in trees.items()}


@pytest.fixture(scope="module")
def graph(statements: dict[str, list[tuple[Import, bool]]]) -> dict[str, set[str]]:
    """The modules that each module imports when it is imported or when its functions run."""
    return {
        name: {*imports([node for node, is_hint in each if not is_hint], statements)} - {"", name}
        for name, each in statements.items()
    }


def test_each_module_belongs_to_a_layer():
    top = {name.partition(".")[0] for name in module_names(ROOT)}
    assert top - {"", "__main__"} == set(ORDER)


def test_imports_go_one_way(statements):
    wrong = set()
    for name, each in statements.items():
        own = name.partition(".")[0]
        if own not in ORDER:
            continue
        for imported in imports([node for node, _ in each], statements):
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


# Libraries

OPTIONAL = {
    *("PIL", "aiohttp", "anthropic", "deltalake", "lance", "openai", "pyiceberg"),
    *("sentence_transformers", "torch", "transformers", "vllm"),
}


def test_what_is_imported_is_declared(statements):
    lines = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", lines, re.MULTILINE | re.DOTALL)
    declared = {re.match(r'\s*"([\w-]+)', line)[1] for line in block[1].splitlines()}
    provided = {str(file).split("/")[0] for name in declared for file in files(name) or ()}
    missing = set()
    for name, each in statements.items():
        for node, _ in each:
            is_plain = isinstance(node, ast.Import)
            modules = [alias.name for alias in node.names] if is_plain else [node.module]
            for top in {module.split(".")[0] for module in modules}:
                standard = top in sys.stdlib_module_names or top in {"vane_dagster", *OPTIONAL}
                if not standard and not provided & {top, f"{top}.py"}:
                    missing.add((name, top))
    assert not missing


PRIVATE_OF = ("ray.", "dagster.", "pyiceberg.")
PRIVATE = re.compile(r"_compression|(?:ray|dagster|pyiceberg)(?:\.\w+)*?\._(?!_)\w+(?:\.\w+)*")


def private_modules(tree: ast.AST) -> Iterator[str]:
    """The private modules that a file imports, or names in its literals as code to run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            private = [each.name for each in node.names if each.name.startswith("_")]
            if PRIVATE.fullmatch(node.module) or (private and node.module.startswith(PRIVATE_OF)):
                yield node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            root: ast.AST = node
            while isinstance(root, ast.Attribute):
                root = root.value
            named = isinstance(root, ast.Name) and f"{root.id}." in PRIVATE_OF
            if named and PRIVATE.fullmatch(text := ast.unparse(node)):
                yield text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            imported = re.findall(r"from (ray\._\w+) import (\w+)", node.value)
            yield from (".".join(each) for each in imported)
            if PRIVATE.fullmatch(node.value):
                yield node.value


def test_the_list_of_private_modules_is_complete(trees):
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    listed = {}
    for line in page.partition("## Private APIs of libraries")[2].splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]]
        if len(cells) == 2 and cells[0]:
            for module in cells[0]:
                listed.setdefault(module.removesuffix(".*"), set()).update(cells[1])
    found: dict[str, set[str]] = {}
    paths = module_names(ROOT)
    for name, tree in trees.items():
        for module in private_modules(tree):
            known = [each for each in listed if module == each or module.startswith(f"{each}.")]
            found.setdefault(*(known or [module]), set()).add(str(paths[name].relative_to(ROOT)))
    assert found == listed


# Files


def test_the_package_is_typed():
    assert (ROOT / "py.typed").is_file()


def test_files_of_tests_have_unique_names():
    """Pytest collects no two modules of one name."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_versions_agree_and_extras_are_documented():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert vane_dagster.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in (REPOSITORY / "CITATION.cff").read_text()
    page = (REPOSITORY / "docs" / "install.md").read_text()
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in page] == []
