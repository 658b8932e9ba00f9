"""Size of the package by subpackage: lines of code, tokens, all lines.

``python tools/size.py [FOLDER]`` counts the checkout in FOLDER, the current folder by default.
Lines of code are lines with a token that is neither a comment nor part of a docstring or an import.
Tokens are those of `tokenize` without comments, line ends, docstrings and imports.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """Sizes of one file."""

    code: int
    tokens: int
    lines: int


def left_out(tree: ast.AST) -> set[int]:
    """The numbers of lines that belong to docstrings and imports."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if first is not None and is_text and ast.get_docstring(node, clean=False) is not None:
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def measure(path: Path) -> Size:
    """Count one file of Python."""
    text = path.read_text()
    skipped = left_out(ast.parse(text))
    code: set[int] = set()
    tokens = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in _LAYOUT or token.start[0] in skipped:
                continue
            tokens += 1
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(len(code), tokens, len(text.splitlines()))


def main() -> None:
    """Print a table of the subpackages, largest first, and the totals."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    package = root / "vane_dagster"
    code, tokens, lines = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "(top level)"
        size = measure(path)
        code[name] += size.code
        tokens[name] += size.tokens
        lines[name] += size.lines
    tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    print(f"{'package':<14} {'code':>8} {'tokens':>9} {'lines':>8}")
    for name, count in code.most_common():
        print(f"{name:<14} {count:>8,} {tokens[name]:>9,} {lines[name]:>8,}")
    print(f"{'all':<14} {code.total():>8,} {tokens.total():>9,} {lines.total():>8,}")
    print(f"{'tests':<14} {'':>8} {'':>9} {tests:>8,}")


if __name__ == "__main__":
    main()
