"""Versions and the code digest that a driver, the pool manager and its workers must share.

Workers and the pool manager outlive runs, so a driver may meet processes that were started from
other code. The digest covers the modules that these processes can import: the import closure of
their entry points in this package. Driver-only code is excluded, so an edit of it keeps pools warm.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import secrets
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENTRY_POINTS = (
    "worker/host.py",
    "worker/ray_actor.py",
    "worker/local_worker.py",
    "compute/pool_manager.py",
)
PICKLED = ("providers",)
"""Folders of classes that are sent pickled: a worker imports them by the names it receives."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import\b(?:[ \t]*\([^)]*\)|.*)|import\b.*)", re.MULTILINE
)
_FOR_TYPE_CHECKERS = re.compile(
    r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:\n(?:\1[ \t]+.*\n|[ \t]*\n)+", re.MULTILINE
)
"""A block that never runs; its ``else`` is not part of it."""


@dataclass(frozen=True)
class Variables:
    """Environment variables of a process, for comparison with another process without their values.

    Attributes:
        salt: Part of each digest.
        digests: Digests of the values, by name.
    """

    salt: bytes
    digests: Mapping[str, bytes]

    @classmethod
    def here(cls) -> Variables:
        """The variables of this process."""
        salt = secrets.token_bytes(16)
        return cls(salt, {name: _salted(salt, value) for name, value in os.environ.items()})

    def equals(self, name: str, value: str | None) -> bool:
        """Return whether a variable has a value.

        Args:
            name: The variable.
            value: The value; None for a variable that is not set.
        """
        return self.digests.get(name) == (None if value is None else _salted(self.salt, value))

    def holds(self, name: str) -> bool:
        """Return whether a variable is set and not empty."""
        return not self.equals(name, None) and not self.equals(name, "")


def _salted(salt: bytes, value: str) -> bytes:
    return hashlib.blake2b(os.fsencode(value), key=salt, digest_size=16).digest()


@dataclass(frozen=True)
class Versions:
    """Versions that must be the same in the driver and in workers.

    Attributes:
        python: Major and minor version; the patch version may differ.
        ray: Ray's version.
        pyarrow: PyArrow's version.
        code: See `protocol`.
        variables: The process's environment variables, which may differ.
    """

    python: str
    ray: str
    pyarrow: str
    code: str
    variables: Variables = field(compare=False)


def installed() -> Versions:
    """The versions in this process."""
    import pyarrow as pa
    import ray

    python = ".".join(map(str, sys.version_info[:2]))
    return Versions(python, ray.__version__, pa.__version__, protocol(), Variables.here())


@functools.lru_cache(maxsize=1)
def protocol() -> str:
    """Code digest of this process's package on disk, as of the first call."""
    return code_digest(Path(__file__).resolve().parent.parent)


def code_digest(package: Path) -> str:
    """Digest of the names and the contents of `shared_files`, in 12 hex digits."""
    state = hashlib.blake2b(digest_size=6)
    for name, content in sorted(shared_files(package).items()):
        state.update(f"{name}\n{len(content)}\n".encode())
        state.update(content)
    return state.hexdigest()


def shared_files(package: Path) -> Mapping[str, bytes]:
    """The files that workers and the pool manager can import, by their paths within the package.

    Imports are detected without running code: import statements anywhere in a file, including
    those in functions but not those for type checkers alone, and strings that are a module's full
    name, with or without an attribute, as in ``"vane_dagster.providers.openai:OpenAIProvider"``.
    Names that are assembled at run time are not detected.

    The package's own ``__init__`` is excluded unless a file imports a name from it: it runs
    everywhere, but consists of the public names, which lead to everything.

    Args:
        package: The folder of the package.

    Raises:
        OSError: If an entry point cannot be read.
    """
    modules = _modules(package)
    found: dict[str, bytes] = {}
    waiting = [*ENTRY_POINTS, *(n for n in modules.values() if n.split("/")[0] in PICKLED)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (package / name).read_bytes()
            waiting += _imported(package.name, name, found[name].decode(), modules)
    return found


def _modules(package: Path) -> Mapping[str, str]:
    """The files of a package, by the full names of their modules."""
    found = {}
    for folder, _, files in os.walk(package):
        inner = Path(folder).relative_to(package).parts
        for file in files:
            stem, suffix = os.path.splitext(file)
            if suffix == ".py":
                own = () if stem == "__init__" else (stem,)
                found[".".join((package.name, *inner, *own))] = "/".join((*inner, file))
    return found


def _imported(package: str, name: str, content: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The files of a package that one of its files imports or names."""
    here = [package, *name.removesuffix(".py").split("/")]
    content = _FOR_TYPE_CHECKERS.sub("", content)
    for statement in import_statements(content):
        if isinstance(statement, ast.Import):
            wanted = [(alias.name, "") for alias in statement.names]
        else:
            above = here[: -statement.level] if statement.level else []
            module = ".".join([*above, *filter(None, [statement.module])])
            wanted = [(module, alias.name) for alias in statement.names]
        for module, attribute in wanted:
            yield from _files(package, module, attribute, modules)
    for match in re.finditer(rf"""["']({package}(?:\.\w+)+)(?::\w+)?["']""", content):
        yield from _files(package, match[1], "", modules)


def import_statements(content: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, at any depth.

    Parsing a full file of 12,000 lines takes 0.2 seconds; parsing these statements alone takes a
    tenth of that. In this package they begin a line, which a test checks. A line of a docstring may
    look like one.
    """
    lines = "\n".join(textwrap.dedent(match[0]) for match in _IMPORT.finditer(content))
    try:
        tree = ast.parse(lines)
    except SyntaxError:
        tree = ast.parse(content)
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def _files(package: str, module: str, attribute: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The files that run on import of a module, and of an attribute that may be a module itself."""
    if module != package and not module.startswith(f"{package}."):
        return
    inner = modules.get(f"{module}.{attribute}")
    if inner is not None:
        yield inner
    elif module == package and attribute:
        yield modules[package]
    while module != package:
        if module in modules:
            yield modules[module]
        module = module.rpartition(".")[0]
