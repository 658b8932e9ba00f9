"""The pages about other systems: their snippets, ours, and what differs between the two."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

import cloudpickle

import vane_dagster as vd
from support.paths import FENCED, REPOSITORY

FOLDER = REPOSITORY / "docs" / "coming-from"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_REFUSED = re.compile(r"^\| `(\w+)=(.+)` \| `(.+)` \|$", re.MULTILINE)
_COUNTED = re.compile(r"^\*\*Changed lines: (\d+)\*\*", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A section of a page with a tab of theirs and one of ours.

    Attributes:
        shared: The code above the tabs, which both sides have.
        counted: The changed lines that the section states; None if it states none.
    """

    page: str
    heading: str
    shared: str
    theirs: str
    ours: str
    counted: int | None

    @property
    def changed_lines(self) -> int | None:
        """The most lines that differ in a function or class of the tabs; None if ours has none."""
        before = _definitions(self.theirs)
        after = _definitions(self.ours)
        counts = (_differing(before.get(name, []), lines) for name, lines in after.items())
        return max(counts, default=None)


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


def _blocks(text: str) -> list[tuple[bool, str]]:
    """The blocks of Python: whether each is indented, and its code."""
    found = FENCED.findall(text)
    return [(bool(at), textwrap.dedent(code)) for at, name, code in found if name == "python"]


def preamble(page: str) -> str:
    """The lines that all blocks of ours continue."""
    return _blocks(_text(page))[0][1]


def block(text: str, heading: str) -> str:
    """The first block of Python below a heading."""
    found = _blocks(text.partition(f"## {heading}\n")[2].partition("\n## ")[0])
    assert found, f"there is no Python below {heading!r}"
    return found[0][1]


def snippets(page: str) -> list[Snippet]:
    """The sections of a page with tabs, of which the first is theirs and the second ours."""
    found = []
    for heading, body in _SECTION.findall(_text(page)):
        blocks = _blocks(body)
        shared = "".join(code for in_tab, code in blocks if not in_tab)
        tabs = [code for in_tab, code in blocks if in_tab]
        assert len(tabs) in (0, 2), f"{page}, {heading}: {len(tabs)} blocks of Python in tabs"
        if tabs:
            stated = _COUNTED.search(body)
            counted = int(stated[1]) if stated else None
            found.append(Snippet(page, heading, shared, *tabs, counted))
    return found


def refused(page: str) -> list[tuple[str, str, str]]:
    """Arguments that a page says are refused: the name, the code of its value, and ours."""
    return _REFUSED.findall(_text(page))


def loaded(
    snippet: Snippet, folder: Path, replaced: Mapping[str, str] = MappingProxyType({})
) -> contextlib.AbstractContextManager[ModuleType]:
    """Import our side of a snippet; see `imported`."""
    name = re.sub(r"\W", "_", f"coming_from_{snippet.page}_{snippet.heading}".lower())
    code = preamble(snippet.page) + snippet.shared + snippet.ours
    return imported(code, name, folder, replaced)


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
    found = [each for each in vars(module).values() if isinstance(each, vd.Pipeline)]
    return [each for each in found if each.stages]


def stage_of(module: ModuleType, name: str) -> vd.Stage:
    return next(each[name] for each in pipelines(module) if name in each.stages)
