"""The identity of a UDF: its code, and all of the user's code that it reaches.

Nothing is run or imported; files are read from disk. The names count that the UDF reaches in any of
the user's files; a module that is used as an object counts as a whole. Of every module that an
import executes, including packages' ``__init__``, the statements count that do something to what
the UDF reaches or to a library (see `effects`). Installed packages are listed, not hashed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.dependencies import FILE, DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles, file_digests
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import Finder, closure
from vane_dagster.fingerprint.objects import ObjectEncoder
from vane_dagster.types.callables import unwrapped


@dataclass(frozen=True)
class CodeIdentity:
    """The identity of a UDF's code.

    Attributes:
        digest: A digest that is the same in every process, folder and machine for the same code.
        parts: The kind, name and digest of what it consists of, the UDF first.
        packages: The top-level names of installed packages that the code reaches. A package that is
            imported lazily and not installed here is assumed to exist on the workers.
        find_modules: Returns `modules`.
        find_texts: Returns the code that counts, for people, by the name of the file's module;
            that of its own file has none.
    """

    digest: str
    parts: tuple[tuple[str, str, str], ...]
    packages: tuple[str, ...]
    find_modules: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    find_texts: Callable[[], dict[str, str]] = field(repr=False, compare=False)

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """The user's own modules that a worker may import for it, including its own module.

        They are found on first use: the search follows imports much further than the digest does.
        """
        return self.find_modules()

    def texts(self) -> dict[str, str]:
        """Return the code that counts, for people, with what each text is."""
        found = self.find_texts().items()
        return {f"code of {name}" if name else "code": text for name, text in found}


_reading: ContextVar[Finder | None] = ContextVar("_reading", default=None)


@contextlib.contextmanager
def files_read_once() -> Iterator[None]:
    """Within it, identities read each file once, and share what its statements reach."""
    token = _reading.set(_reading.get() or Finder())
    try:
        yield
    finally:
        _reading.reset(token)


def code_identity(
    obj: Callable[..., Any],
    *,
    version: str | None = None,
    files: LocalFiles | None = None,
) -> CodeIdentity:
    """Compute the identity of a function, a class or a partial of one."""
    target = unwrapped(obj)
    if not callable(obj) or not hasattr(target, "__qualname__"):
        raise CodeIdentityError(
            f"{type(obj).__qualname__} object: expected a function, a class or a partial of one. "
            f"Pass the class itself, and its arguments separately."
        )
    finder = _reading.get() or Finder()
    module = finder.find(getattr(target, "__module__", None) or "__main__")
    files = files if version is None else LocalFiles(read=False)
    dependency_walk = DependencyWalk(finder, module, files)
    encoder = ObjectEncoder(dependency_walk, files)
    if version is None:
        token = encoder.digest(obj, target.__qualname__)
        reached = dependency_walk.parts()
        own = combine("own", token, reached.pop(target.__qualname__, ""))
        parts = [("code", target.__qualname__, own)]
        for name, part in reached.items():
            kind, _, file = name.partition(f"{FILE} ")
            parts.append(("code", name, part) if kind else (FILE, file, part))
        digest = combine("code", *(part for *_, part in parts))
    else:
        with contextlib.suppress(CodeIdentityError):
            encoder.digest(obj, target.__qualname__)
        where = module.label if module is not None else ""
        owner = getattr(getattr(target, "__self__", None), "__qualname__", "")  # of a class method
        name = f"{owner}.{target.__name__}" if owner else target.__qualname__
        digest = combine("version", where, name, version)
        parts = [("code", target.__qualname__, digest)]
    seeds = dependency_walk.modules | dependency_walk.imported
    if module is not None:
        seeds.add(module.name)
    packages = tuple(sorted(dependency_walk.packages))
    return CodeIdentity(
        digest, tuple(parts), packages, lambda: closure(finder, seeds), dependency_walk.texts
    )


def worker_code_digest(
    obj: Callable[..., Any], *, version: str | None = None, files: LocalFiles | None = None
) -> str:
    """Return the digest of the code that the workers of a function or class run.

    All methods of a class count, so that stages that call different ones share its workers. With a
    version, which replaces the code's content in keys, the files that workers import count as a
    whole, so that no edit meets a worker with other code.
    """
    found = code_identity(obj, version=version, files=files)
    if version is None:
        return found.digest
    finder = Finder()
    modules = [finder.find(name) for name in found.modules]
    paths = [module.path for module in modules if module and module.path]
    return combine("files", found.digest, *file_digests(paths, found.parts[0][1], "its code"))
