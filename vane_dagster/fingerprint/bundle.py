"""Packaging of the user's code for workers: a zip named by its content, and the pickled object.

Only Python modules are packed. Adjacent data files are not: pass their path or content as an
argument.
"""

from __future__ import annotations

import functools
import hashlib
import io
import linecache
import os
import re
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vane_dagster.errors import CodeIdentityError, described
from vane_dagster.fingerprint.local_file import FileContent, LocalFile
from vane_dagster.fingerprint.modules import MAIN_NAMES, Finder, Module

_OLDEST_TIME = (1980, 1, 1, 0, 0, 0)
_by_value_lock = threading.Lock()

_CACHED = type(functools.cache(print))
_CLASS_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class CodeBundle:
    """Everything that a worker needs to load an object of the user's.

    Attributes:
        archive: A zip of the user's own modules, each at its import path.
        payload: The pickled object; definitions of the packed modules are pickled by name, and
            local files by the digest of their content.
        content: Digest of both, which is the same in each process.
    """

    archive: bytes
    payload: bytes
    content: str


def pack(
    modules: Iterable[str], obj: Any, files: Mapping[LocalFile, FileContent] | None = None
) -> CodeBundle:
    """Pack an object of the user's with the modules that it may import."""
    finder = Finder()
    sources: dict[str, bytes] = {}
    for name in modules:
        for prefix, module in finder.chain(name):
            if prefix not in MAIN_NAMES and module is not None and module.kind == "own":
                sources.update(_file(module))
    ids: set[str] = set()
    payload = pickled(obj, files or {}, ids=ids)
    archive = _zip(sources)
    content = hashlib.sha256(archive + without_ids(payload, ids)).hexdigest()
    return CodeBundle(archive, payload, content)


def without_ids(payload: bytes, ids: Iterable[str]) -> bytes:
    """Remove the random ids of classes from a pickled object."""
    for id in ids:
        payload = payload.replace(id.encode(), b"")
    return payload


def pickled(
    obj: Any,
    files: Mapping[LocalFile, FileContent],
    by_value: Collection[str] = MAIN_NAMES,
    visit: Callable[[Any], None] | None = None,
    protocol: int | None = None,
    ids: set[str] | None = None,
) -> bytes:
    """Pickle an object for workers: a script's definitions by value, local files by digest.

    `visit` is called with each part of the object, also those in containers. `ids` takes the random
    ids that cloudpickle gives to classes in this process.
    """
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its base has no types
        def reducer_override(self, part: Any) -> Any:
            # cloudpickle pickles it by its module's name, which names another module in a worker.
            if isinstance(part, _CACHED) and part.__module__ in by_value:
                return _cached, (part.__wrapped__, part.cache_parameters())
            if isinstance(part, types.CodeType) and (lines := _lines_of_cell(part.co_filename)):
                make, arguments = self.dispatch_table[types.CodeType](part)
                return _code_of_cell, (part.co_filename, lines, make, arguments)
            reduced = super().reducer_override(part)
            if ids is not None and isinstance(part, type) and isinstance(reduced, tuple):
                texts = [each for each in reduced[1] if isinstance(each, str)]
                ids.update(filter(_CLASS_ID.fullmatch, texts))
            return reduced

        def persistent_id(self, part: Any) -> Any:
            if visit is not None:
                visit(part)
            if not isinstance(part, LocalFile):
                return None
            if part not in files:
                raise TypeError(f"{part} is not an argument; pass it as one, or in a container")
            return files[part].digest

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol).dump(obj)
    except Exception as error:
        raise CodeIdentityError(
            f"{getattr(obj, '__qualname__', type(obj).__qualname__)} cannot be pickled for the "
            f"workers: {described(error)}. Define it at the top level of a module, "
            f"and build what cannot travel (connections, locks, models) inside it."
        ) from error
    return buffer.getvalue()


def pickled_by_value(
    modules: Iterable[str],
    obj: Any,
    visit: Callable[[Any], None] | None = None,
    protocol: int | None = None,
    ids: set[str] | None = None,
) -> bytes:
    """Pickle an object for workers that have none of the user's modules."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

    with _by_value_lock, sent_by_value(cloudpickle, modules) as own:
        return pickled(obj, {}, {*MAIN_NAMES, *own}, visit, protocol, ids)


@contextmanager
def sent_by_value(pickle: Any, modules: Iterable[str]) -> Iterator[list[str]]:
    """Let a cloudpickle send the user's own modules, which are not installed on the workers."""
    own = [sys.modules[name] for name in modules if name in sys.modules and name not in MAIN_NAMES]
    for module in own:
        pickle.register_pickle_by_value(module)
    try:
        yield [module.__name__ for module in own]
    finally:
        for module in own:
            pickle.unregister_pickle_by_value(module)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _lines_of_cell(filename: str) -> list[str]:
    """Return the lines of a notebook or console cell, which no file holds."""
    return [] if os.path.isfile(filename) else linecache.getlines(filename)


def _code_of_cell(filename: str, lines: list[str], make: Any, arguments: Any) -> Any:
    """Make code whose tracebacks show its lines."""
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return make(*arguments)


for _function in (_cached, _code_of_cell):  # pickle them by value: workers have no such module
    _function.__module__ = "__main__"


def _file(module: Module) -> dict[str, bytes]:
    if module.path is None:
        return {}
    base = module.name.replace(".", "/")
    # An extension module keeps its whole suffix: `fast.cpython-311-x86_64-linux-gnu.so`.
    suffix = "." + os.path.basename(module.path).partition(".")[2]
    inner = f"/__init__{suffix}" if module.search is not None else suffix
    try:
        return {base + inner: Path(module.path).read_bytes()}
    except OSError as error:
        raise CodeIdentityError(
            f"The module {module.name!r} cannot be read for the workers: {error}. Restore its file."
        ) from error


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _OLDEST_TIME)
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()
