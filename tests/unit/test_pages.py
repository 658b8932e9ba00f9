"""The pages: links that lead somewhere, and examples that are valid."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import vane_dagster

ROOT = Path(vane_dagster.__file__).parents[1]
FOLDERS = [ROOT / name for name in ("", "docs", "examples", "benchmarks")]
PAGES = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_in_pages_is_valid(page):
    for language, code in FENCED.findall(page.read_text()):
        if language == "python":
            compile(textwrap.dedent(code), str(page), "exec")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in PAGES if page.parent == ROOT / "docs"}
