"""The pages: links and paths that lead somewhere, and examples that are valid."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import vane_dagster
from support.paths import FENCED
from vane_dagster.orchestration.run_options import RunOptions

PACKAGE = Path(vane_dagster.__file__).parent
ROOT = PACKAGE.parent
FOLDERS = ("docs", "examples", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md"))])
LIVING = [page for page in PAGES if page.name != "CHANGELOG.md"]
READERS_OWN = {
    "lengths.py",
    "reviews.py",
    "definitions.py",
    "defs.yaml",
    "defs/",
    "dist/",
    "benchmarks/results/",
}
"""Paths of the reader's own files, and of files that a benchmark writes."""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def named_paths(text: str) -> set[str]:
    """The paths of files, folders and modules that a page names in backticks and in diagrams.

    A token is a path if it ends like a file or a folder, begins with a folder of the repository or
    of the package, or is a dotted name in the package.
    """
    diagrams = " ".join(code for _, language, code in FENCED.findall(text) if language == "mermaid")
    drawn = re.findall(r"(?<![<\w/])[\w/]+(?:\.py|/)(?!\w)", diagrams)
    ticked = re.findall(r"`([\w./-]+)`", FENCED.sub("", text))
    folders = {path.name for root in (ROOT, PACKAGE) for path in root.iterdir() if path.is_dir()}
    return {
        name
        for name in (*ticked, *drawn)
        if re.fullmatch(r"\w.*(\.(py|md|toml|yaml)|/)", name)
        or ("/" in name and name.partition("/")[0] in folders)
        or name.startswith("vane_dagster.")
    }


def programs(text: str) -> set[str]:
    """The reader's programs: the files that a page's commands name."""
    consoles = [code for _, language, code in FENCED.findall(text) if language == "console"]
    return {name for code in consoles for name in re.findall(r"\b\w+\.py\b", code)}


def path_exists(name: str, page: Path) -> bool:
    """Whether a page's path exists: a file, a folder, or an attribute of a module.

    It is relative to the repository, the package or the page. A file's name alone may be that of
    any file of the package or of the tests.
    """
    if name.startswith("vane_dagster."):
        name = name.replace(".", "/")
        name = name if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists() else dotted(name)
    for root in (ROOT, PACKAGE, page.parent):
        if (root / name).exists() or (root / f"{name}.py").exists():
            return True
        module, _, attribute = name.rpartition(".")
        for file in (root / f"{module}.py", root / module / "__init__.py"):
            if module and file.exists():
                return re.search(rf"\b{attribute}\b", file.read_text()) is not None
    return "/" not in name and any(any(root.rglob(name)) for root in (PACKAGE, ROOT / "tests"))


def dotted(name: str) -> str:
    """The path of a module's attribute: the module's path, a dot, and the attribute."""
    return ".".join(name.rsplit("/", 1))


@pytest.mark.parametrize("page", LIVING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_pages_exist(page):
    named = named_paths(page.read_text()) - READERS_OWN - programs(page.read_text())
    assert sorted(name for name in named if not path_exists(name, page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_in_pages_is_valid(page):
    for _, language, code in FENCED.findall(page.read_text()):
        if language == "python":
            compile(textwrap.dedent(code), str(page), "exec")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_architecture_page_takes_15_minutes():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.split()) <= 15 * 240
    terms = page.partition("## Terms")[2].partition("##")[0]
    assert len(re.findall(r"^\| ", terms, re.MULTILINE)) - 1 <= 20


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "coming-from"])
def test_pages_about_other_systems_are_short(page):
    assert len(page.read_text().splitlines()) <= 300


def test_the_page_of_the_configuration_has_every_option_of_a_run_and_every_variable():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "configuration.md").read_text()))
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    ours = set(re.findall(r"\bVANE_DAGSTER_[A-Z_]+\b", code))
    internal = {"VANE_DAGSTER_FAULTS", "VANE_DAGSTER_HEAD", "VANE_DAGSTER_WORKER"}
    assert {*RunOptions.model_fields, *ours} - internal <= named
