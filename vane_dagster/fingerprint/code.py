"""The identity of a UDF: its code, and all of the user's code that it reaches.

Nothing is run or imported; files are read from disk. In the UDF's own file, only the names that it
reaches count. Another module of the user's that is reached by name counts whole. For every other
module that executes on import, including packages' ``__init__``, only the statements count that
change what the UDF reaches or the state of a library (see `import_effects`). Installed packages are
listed, not hashed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine, file_digest
from vane_dagster.fingerprint.modules import Finder, closure
from vane_dagster.fingerprint.objects import ObjectEncoder
from vane_dagster.fingerprint.unused_methods import (
    named_methods,
    unused_methods,
    without_methods,
)
from vane_dagster.types.callables import unwrapped


@dataclass(frozen=True)
class CodeIdentity:
    """The identity of a UDF's code.

    Attributes:
        digest: A digest that is the same in every process, folder and machine for the same code.
        packages: The top-level names of installed packages that the code reaches. A package that is
            imported lazily and not installed here is assumed to exist on the workers.
        find_modules: Returns `modules`.
        statements: The statements that count.
    """

    digest: str
    packages: tuple[str, ...]
    find_modules: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    statements: tuple[ast.AST, ...] = field(repr=False, compare=False)

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """The user's own modules that a worker may import for it, including its own module.

        They are found on first use: the search follows imports much further than the digest does.
        """
        return self.find_modules()

    @property
    def literals(self) -> frozenset[str]:
        """The string literals of the code that counts."""
        nodes = (node for statement in self.statements for node in ast.walk(statement))
        values = (node.value for node in nodes if isinstance(node, ast.Constant))
        return frozenset(value for value in values if isinstance(value, str))


def code_identity(
    obj: Callable[..., Any],
    *,
    method: str | None = None,
    version: str | None = None,
    files: LocalFiles | None = None,
    hints: bool = False,
) -> CodeIdentity:
    """Compute the identity of a function, a class or a partial of one.

    Args:
        obj: The UDF.
        method: The method of a class that is called. Other methods under `vd.method` count only if
            what is called may reach them. Default: all methods count.
        version: Replaces the code's content: only the name and the version are hashed.
        files: Reads the files that paths among the code's values name.
        hints: Whether the type hints of the UDF itself are read at run time, and so count as code.

    Raises:
        CodeIdentityError: A dependency of the UDF has no stable identity, and no version is given.
    """
    target = unwrapped(obj)
    if not callable(obj) or not hasattr(target, "__qualname__"):
        raise CodeIdentityError(
            f"{type(obj).__qualname__} object: expected a function, a class or a partial of one. "
            f"Pass the class itself, and its arguments separately."
        )
    finder = Finder()
    module = finder.find(getattr(target, "__module__", None) or "__main__")
    files = files if version is None else LocalFiles(read=False)
    hints_of = _with_calls(target) if hints else frozenset()
    unused: frozenset[str] = frozenset()
    if version is None and method is not None and isinstance(target, type):
        unused = unused_methods(finder, target, method)
    while True:
        dependency_walk = DependencyWalk(finder, module)
        dependency_walk.hints_of = hints_of
        if unused and module is not None:
            (unit,) = finder.source(str(module.path)).units[target.__name__]
            dependency_walk.replaced[id(unit)] = without_methods(unit, unused)
        encoder = ObjectEncoder(dependency_walk, files, {target: unused} if unused else None)
        if version is not None:
            with contextlib.suppress(CodeIdentityError):
                encoder.digest(obj, target.__qualname__)
            where = module.label if module is not None else ""
            digest = combine("version", where, target.__qualname__, version)
            break
        token = encoder.digest(obj, target.__qualname__)
        digest = combine("code", token, dependency_walk.digest())
        named = named_methods(dependency_walk.units, unused)
        if not named:
            break
        unused -= named
    seeds = dependency_walk.modules | dependency_walk.imported
    if module is not None:
        seeds.add(module.name)
    packages = tuple(sorted(dependency_walk.packages))
    statements = tuple(node for unit in dependency_walk.units for node in unit.nodes)
    return CodeIdentity(digest, packages, lambda: closure(finder, seeds), statements)


def worker_code_digest(
    obj: Callable[..., Any], *, version: str | None = None, files: LocalFiles | None = None
) -> str:
    """Return the digest of the code that the workers of a function or class run.

    All methods of a class count, so that stages that call different ones share its workers. With a
    version, which replaces the code's content in keys, the files that workers import count as a
    whole, so that no edit meets a worker with other code.

    Args:
        obj: The function or class.
        version: See `code_identity`.
        files: See `code_identity`.

    Raises:
        CodeIdentityError: The code has no stable identity, and no version is given.
    """
    found = code_identity(obj, version=version, files=files)
    if version is None:
        return found.digest
    finder = Finder()
    modules = [finder.find(name) for name in found.modules]
    texts = [file_digest(module.path) for module in modules if module and module.path]
    return combine("files", found.digest, *texts)


def _with_calls(target: Any) -> frozenset[str]:
    """Return the qualified names of a function, or of a class and its ``__call__``."""
    name = target.__qualname__.replace("<locals>.", "")
    found = {name, name.rpartition(".")[2]}
    return frozenset(found | {f"{item}.__call__" for item in found})
