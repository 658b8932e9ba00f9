"""The pages about other systems: their snippets, ours, and what differs between the two."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

import cloudpickle

import vane_dagster as vd
from support.paths import REPOSITORY

FOLDER = REPOSITORY / "docs" / "coming-from"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_REFUSED = re.compile(r"^\| `(\w+)=(.+)` \| `(.+)` \|$", re.MULTILINE)
_COUNTED = re.compile(r"^\| \[(.+?)\]\(#.+?\) \| (.+?) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A section of a page."""

    page: str
    heading: str
    theirs: str
    ours: str

    @property
    def changed_lines(self) -> int | None:
        """The lines that differ in the functions and classes of ours; None if it has none."""
        after = _definitions(self.ours)
        if not after:
            return None
        before = _definitions(self.theirs)
        return sum(_differing(before.get(name, []), lines) for name, lines in after.items())


def _differing(before: list[str], after: list[str]) -> int:
    matched = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matched.get_opcodes() if tag != "equal")


def _definitions(code: str) -> dict[str, list[str]]:
    """The lines of each function and class at the top level, without their indentation."""
    return {
        node.name: [line.strip() for line in ast.unparse(node).splitlines() if line.strip()]
        for node in ast.parse(code).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }


def _text(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text()


def preamble(page: str) -> str:
    """The lines that all blocks of ours continue."""
    found = _BLOCK.search(_text(page))
    assert found is not None, f"{page} has no block of Python"
    return found[1]


def block(text: str, heading: str) -> str:
    """The first block of Python below a heading."""
    found = _BLOCK.search(text.partition(f"## {heading}\n")[2].partition("\n## ")[0])
    assert found is not None, f"there is no Python below {heading!r}"
    return found[1]


def snippets(page: str) -> list[Snippet]:
    """The sections of a page that show a block of theirs and one of ours."""
    found = []
    for heading, body in _SECTION.findall(_text(page)):
        blocks = _BLOCK.findall(body)
        assert len(blocks) in (0, 2), f"{page}, {heading}: {len(blocks)} blocks of Python"
        if blocks:
            found.append(Snippet(page, heading, *blocks))
    return found


def counted(page: str) -> dict[str, int | None]:
    """The changed lines of each snippet in a page's table; None for "no function"."""
    table = _text(page).partition("## Changed lines\n")[2]
    return {
        heading: None if lines == "no function" else int(lines)
        for heading, lines in _COUNTED.findall(table)
    }


def refused(page: str) -> list[tuple[str, str, str]]:
    """Arguments that a page says are refused: the name, the code of its value, and ours."""
    return _REFUSED.findall(_text(page))


def loaded(
    snippet: Snippet, folder: Path, replaced: Mapping[str, str] = MappingProxyType({})
) -> contextlib.AbstractContextManager[ModuleType]:
    """Import our side of a snippet; see `imported`."""
    name = re.sub(r"\W", "_", f"coming_from_{snippet.page}_{snippet.heading}".lower())
    return imported(preamble(snippet.page) + snippet.ours, name, folder, replaced)


@contextlib.contextmanager
def imported(
    code: str, name: str, folder: Path, replaced: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ModuleType]:
    """Import code as a module that a reader would have."""
    for text, by in replaced.items():
        assert text in code
        code = code.replace(text, by)
    (folder / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
        cloudpickle.register_pickle_by_value(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def pipelines(module: ModuleType) -> list[vd.Pipeline]:
    """The pipelines of a module that have stages."""
    found = [each for each in vars(module).values() if isinstance(each, vd.Pipeline)]
    return [each for each in found if each.stages]


def stage_of(module: ModuleType, name: str) -> vd.Stage:
    """A stage of a module's pipelines."""
    return next(each[name] for each in pipelines(module) if name in each.stages)
