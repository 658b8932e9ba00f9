"""The identity of a UDF: what its code says, and that of everything of the user's that it reaches.

Nothing is run or imported: files are read as they are on disk. In the file that holds the UDF only
the names that it reaches count; of another module of the user's that is reached by name, the whole
module counts. Of every module that is executed on the way, packages' ``__init__`` among them, those
statements count that change what is reached or the state of a library (see `effects`). Installed
packages are listed, not hashed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import Finder, closure
from vane_dagster.fingerprint.objects import ObjectEncoder, unwrapped


@dataclass(frozen=True)
class CodeIdentity:
    """What a UDF's code is.

    Attributes:
        digest: The same in every process, folder and machine for the same code.
        modules: The user's own modules that a worker may import for it, its own one included.
        packages: The top-level names of installed packages that the code reaches. A package that
            is imported lazily and not installed here counts as one that the worker has.
        effects: Digest of the statements that change what the code reads, or the state of a
            library, when its modules are imported; empty where a version stands for the code.
    """

    digest: str
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    effects: str = ""


def code_identity(
    obj: Callable[..., Any],
    *,
    version: str | None = None,
    files: LocalFiles | None = None,
    hints: bool = False,
) -> CodeIdentity:
    """Tells the identity of a function, a class or a partial of one.

    Args:
        obj: The UDF.
        version: Stands for the code's content: with it only the name and the version are hashed.
        files: Reads what paths among the code's values name.
        hints: Whether the type hints of the UDF itself are read, and so are part of its code.

    Raises:
        CodeIdentityError: Something that the UDF depends on has no stable identity, and no version
            is given.
    """
    target = unwrapped(obj)
    if not callable(obj) or not hasattr(target, "__qualname__"):
        raise CodeIdentityError(
            f"{type(obj).__qualname__} object: expected a function, a class or a partial of one. "
            f"Pass the class itself, and its arguments separately."
        )
    finder = Finder()
    module = finder.find(getattr(target, "__module__", None) or "__main__")
    dependency_walk = DependencyWalk(finder, module)
    if hints:
        name = target.__qualname__.replace("<locals>.", "")
        names = {name, name.rpartition(".")[2]}
        dependency_walk.hints_of = frozenset(names | {f"{item}.__call__" for item in names})
    encoder = ObjectEncoder(dependency_walk, files if version is None else LocalFiles(read=False))
    effects = ""
    if version is None:
        token = encoder.digest(obj, target.__qualname__)
        digest = combine("code", token, dependency_walk.digest())
        effects = dependency_walk.effects
    else:
        with contextlib.suppress(CodeIdentityError):
            encoder.digest(obj, target.__qualname__)
        where = module.label if module is not None else ""
        digest = combine("version", where, target.__qualname__, version)
    seeds = dependency_walk.modules | dependency_walk.imported
    if module is not None:
        seeds.add(module.name)
    packages = tuple(sorted(dependency_walk.packages))
    return CodeIdentity(digest, closure(finder, seeds), packages, effects)
