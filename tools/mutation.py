"""Mutation test of the key modules: how many small changes of the code the unit tests detect.

``python tools/mutation.py [--seed N] [--mutants N] [--group NAME]...`` draws mutants of the modules
of each group of the checkout in the current folder, runs the group's tests on each mutant, and
prints how many were killed and which survived. The same source and seed give the same mutants.
Mutants are written to a temporary copy of the package. A run that exceeds its time limit counts as
killed. Strings, messages, annotations and decorators stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The modules of each group, and the tests that should kill their mutants, in this order.
GROUPS = {
    "planner": ("planning/planner.py", "planning test_simulation.py"),
    "scheduler": (
        "engine/scheduler.py engine/fragment_state.py engine/fragment_queue.py retries.py",
        "engine/test_scheduler.py test_retries.py "
        "engine/test_memory_budget.py engine/test_accounting.py engine/test_slicing.py "
        "compute/test_work_claims.py test_simulation.py",
    ),
    "row reuse": (
        "worker/row_reuse.py worker/recorded_rows.py engine/row_lookups.py",
        "worker/test_row_order.py worker/test_row_index.py worker/test_row_reuse.py "
        "engine/test_reused_files.py engine/test_reused_partitions.py engine/test_row_lookups.py "
        "test_simulation.py",
    ),
    "identity": (
        "fingerprint/code.py fingerprint/dependencies.py fingerprint/effects.py "
        "fingerprint/symbols.py fingerprint/files.py",
        "fingerprint",
    ),
    "committer": (
        "engine/committer.py",
        "engine/test_accounting.py engine/test_committer.py checks/test_checks.py "
        "storage/test_store.py storage/test_damage.py test_simulation.py",
    ),
    "pool state": (
        "compute/pool_state.py",
        "compute/test_pool_state.py compute/test_growth.py compute/test_work_claims.py",
    ),
}

_SKIPPED = ast.Raise | ast.Assert | ast.JoinedStr  # messages
_UNCHANGED = {"annotation", "returns", "decorator_list"}
_LOGGING = ("_log.", "warnings.")
_NEGATIONS = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_PAIRS = (
    *_NEGATIONS,
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.And, ast.Or)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
_OPERATORS: dict[Any, Any] = {
    **{old: new for pair in _PAIRS for old, new in (pair, pair[::-1])},
    **{ast.Div: ast.Mult, ast.Mod: ast.FloorDiv},
}
_MEMORY_BYTES = 8 << 30


class Mutant(NamedTuple):
    """A module with one change."""

    file: str
    position: int
    description: str
    source: bytes


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the code in order, without annotations, decorators, messages and logging."""
    yield tree
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _SKIPPED) or name in _UNCHANGED:
                continue
            if not (isinstance(child, ast.Expr) and ast.unparse(child).startswith(_LOGGING)):
                yield from _nodes(child)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield what to replace, a description, and the replacement."""
    match node:
        case ast.Compare(left, ops, operands):
            for i, op in enumerate(ops):
                swapped = [*ops[:i], _OPERATORS[type(op)](), *ops[i + 1 :]]
                yield node, _names(op), ast.Compare(left, swapped, operands)
        case ast.BoolOp(op, values):
            yield node, _names(op), ast.BoolOp(_OPERATORS[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            yield node, _names(op), ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in _OPERATORS:
            yield node, _names(op), ast.AugAssign(target, _OPERATORS[type(op)](), value)
        case ast.UnaryOp(ast.Not(), operand):
            yield node, "not removed", operand
        case ast.Constant(bool(value)):
            yield node, f"{value} -> {not value}", ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, f"{value} -> {value + 1}", ast.Constant(value + 1)
        case ast.Return(ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield node, "return None", ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()):
            yield node, "removed", ast.Pass()
        case ast.Break():
            yield node, "break -> continue", ast.Continue()
        case ast.Continue():
            yield node, "continue -> break", ast.Break()
        case ast.If(test) | ast.While(test) | ast.IfExp(test) | ast.comprehension(ifs=[test]):
            operator = type(test.ops[0]) if isinstance(test, ast.Compare) else type(test)
            if operator not in (*itertools.chain(*_NEGATIONS), ast.UnaryOp):  # done already
                yield test, "condition negated", ast.UnaryOp(ast.Not(), test)


def _names(operator: ast.AST) -> str:
    return f"{type(operator).__name__} -> {_OPERATORS[type(operator)].__name__}"


def mutants(file: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, in the order of the source."""
    source = Path(file).read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for each in _nodes(ast.parse(source)):
        for node, change, new in _changes(each):
            assert isinstance(node, ast.expr | ast.stmt)
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"
            place = f"{file}:{node.lineno}:{node.col_offset + 1}"
            description = f"{place}  {change}: {lines[node.lineno - 1].decode().strip()}"
            yield Mutant(file, start, description, source[:start] + text.encode() + source[end:])


def run(tests: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy. Only a run without a limit, before the mutants, writes bytecode."""
    environment = {"SIMULATIONS": "4", **os.environ, "CI": "1", "PYTHONPATH": os.getcwd()}
    environment |= {"TMPDIR": f"{os.getcwd()}/tmp", "PYTHONDONTWRITEBYTECODE": "1" if limit else ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/unit/{test}" for test in tests.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)


def survives(mutant: Mutant, tests: str, limit: float) -> bool:
    """Return whether all tests pass with the mutant in place of its module."""
    path = Path(mutant.file)
    original = path.read_bytes()
    path.write_bytes(mutant.source)
    try:
        return run(tests, limit).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_bytes(original)


def run_group(name: str, seed: int, count: int) -> list[Mutant]:
    """Print the line of a group, and return the mutants that survived."""
    files, tests = GROUPS[name]
    possible = [mutant for file in files.split() for mutant in mutants(f"vane_dagster/{file}")]
    sample = random.Random(f"{seed} {name}").sample(possible, min(count, len(possible)))
    began = time.monotonic()
    unchanged = run(tests)
    if unchanged.returncode:
        sys.exit(f"{name}: the tests fail without a mutant\n{unchanged.stdout}{unchanged.stderr}")
    limit = 10 + 3 * (time.monotonic() - began)
    survivors = [mutant for mutant in sample if survives(mutant, tests, limit)]
    total, killed = len(sample), len(sample) - len(survivors)
    print(
        f"{name:<10} {len(possible):>9} {total:>8} {killed:>7} {killed / total:>6.0%}", flush=True
    )
    return sorted(survivors)


def main() -> None:
    """Print a table of the groups, then the mutants that survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=20, help="mutants drawn from each group")
    parser.add_argument("--group", action="append", choices=GROUPS, help="default: all groups")
    options = parser.parse_args()
    print("$ python", shlex.join(sys.argv), f"  # seed {options.seed}\n")
    print(f"{'group':<10} {'possible':>9} {'mutants':>8} {'killed':>7} {'ratio':>6}", flush=True)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    with tempfile.TemporaryDirectory(prefix="mutation-") as copy:
        for name in ("vane_dagster", "tests"):
            shutil.copytree(name, f"{copy}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy("pyproject.toml", copy)
        os.chdir(copy)
        os.mkdir("tmp")
        names = options.group or GROUPS
        survivors = {name: run_group(name, options.seed, options.mutants) for name in names}
    for name, group in survivors.items():
        print(f"\n{name}: {len(group)} survived", *(f"  {m.description}" for m in group), sep="\n")


if __name__ == "__main__":
    main()
