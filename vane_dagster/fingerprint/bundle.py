"""The user's code on its way to a worker: a zip named by its content, and the pickled object.

Only Python modules travel. Data files that lie beside them do not: pass their path, or their
content, as an argument.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import re
import shutil
import stat
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vane_dagster._private_folder import new_temporary_folder, private_folder
from vane_dagster.errors import CodeIdentityError, ComputeError
from vane_dagster.fingerprint.modules import Finder, Module, module_attribute, module_folders

_MAIN = ("__main__", "__mp_main__")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OLDEST_TIME = (1980, 1, 1, 0, 0, 0)
_by_value_lock = threading.Lock()


@dataclass(frozen=True)
class CodeBundle:
    """What a worker needs to have an object of the user's.

    Attributes:
        digest: The sha256 of the archive.
        archive: A zip of the user's own modules, each at the path that its name imports from.
        payload: The pickled object; what stands in one of the modules is pickled by its name.
    """

    digest: str
    archive: bytes
    payload: bytes


def pack(modules: Iterable[str], obj: Any) -> CodeBundle:
    """Packs an object of the user's with the modules that it may import.

    Args:
        modules: Dotted names, as `CodeIdentity.modules` lists them. A script (``__main__``) is left
            out: what it defines is pickled by value.
        obj: A function, a class, or anything that pickles.

    Raises:
        CodeIdentityError: A module's file is missing, or the object cannot be pickled.
    """
    finder = Finder()
    files: dict[str, bytes] = {}
    for name in modules:
        for prefix, module in finder.chain(name):
            if prefix not in _MAIN and module is not None and module.kind == "own":
                files.update(_file(module))
    try:
        payload = _pickled(obj)
    except Exception as error:
        raise CodeIdentityError(
            f"{getattr(obj, '__qualname__', type(obj).__qualname__)} cannot be pickled for the "
            f"workers: {type(error).__name__}: {error}. Define it at the top level of a module, "
            f"and build what cannot travel (connections, locks, models) inside it."
        ) from error
    archive = _zip(files)
    return CodeBundle(hashlib.sha256(archive).hexdigest(), archive, payload)


def _pickled(obj: Any) -> bytes:
    """Pickles what a script defines by value, its functions under `lru_cache` included."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its base has no types
        def reducer_override(self, part: Any) -> Any:
            # cloudpickle names these by their module, and a worker's `__main__` is another.
            if isinstance(part, functools._lru_cache_wrapper) and part.__module__ in _MAIN:
                return _cached, (part.__wrapped__, part.cache_parameters())
            return super().reducer_override(part)

    buffer = io.BytesIO()
    Pickler(buffer).dump(obj)
    return buffer.getvalue()


def pickled_by_value(modules: Iterable[str], obj: Any) -> bytes:
    """Pickles an object for workers that have none of the user's modules.

    Args:
        modules: The user's own modules that it may need, as `CodeIdentity.modules` lists them. What
            stands in one of them is pickled by its content; those not imported yet are left out.
        obj: The object.

    Raises:
        CodeIdentityError: The object cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

    own = [sys.modules[name] for name in modules if name in sys.modules and name not in _MAIN]
    with _by_value_lock:
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            return _pickled(obj)
        except Exception as error:
            raise CodeIdentityError(
                f"{type(obj).__qualname__} cannot be pickled for the workers: "
                f"{type(error).__name__}: {error}. Let its attributes be plain values"
            ) from error
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _file(module: Module) -> dict[str, bytes]:
    if module.path is None:
        return {}
    base = module.name.replace(".", "/")
    # An extension module keeps all of its suffix: `fast.cpython-311-x86_64-linux-gnu.so`.
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


def unpack(archive: bytes, digest: str, root: Path) -> Path:
    """Extracts an archive to ``root/<digest>``, whole or not at all; many processes may race.

    A folder that exists already is compared with the archive, file by file. One that differs is
    replaced: some of its files were deleted as old temporary files, or it was tampered with.

    Args:
        archive: What `pack` made.
        digest: Its sha256.
        root: A folder, made private.

    Raises:
        ComputeError: The archive is not what the digest says, an entry would leave the folder, or
            the root is not private.
    """
    actual = hashlib.sha256(archive).hexdigest()
    if not _DIGEST.fullmatch(digest) or actual != digest:
        raise ComputeError(
            f"The code that arrived has digest {actual}, expected {digest}: it was changed or cut "
            f"on its way. Run again; if it stays so, check what carries data to the workers."
        )
    files = _entries(archive)
    folder = private_folder(root) / digest
    with _locked(folder.parent):
        if not _holds(folder, files):
            partial = new_temporary_folder(".partial-", folder.parent)
            try:
                _extract(files, partial / "new")
                if os.path.lexists(folder):
                    folder.rename(partial / "old")
                (partial / "new").rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Holds the folder's lock, so that no process replaces what another has just unpacked."""
    import fcntl

    with open(root / "lock", "w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _entries(archive: bytes) -> dict[str, bytes]:
    """The files of an archive by their paths."""
    files = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for info in opened.infolist():
            parts = info.filename.split("/")
            if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
                raise ComputeError(
                    f"The code's archive holds {info.filename!r}, which would lie outside of its "
                    f"folder. Only archives that `pack` made are accepted."
                )
            files[info.filename] = opened.read(info)
    return files


def _extract(files: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a folder holds exactly these files, and no links.

    Compiled modules are deleted: Python imports one if its source has the expected time and size.
    """
    if not stat.S_ISDIR(_mode(folder)):
        return False
    found = set()
    for place, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            cache = os.path.join(place, "__pycache__")
            os.unlink(cache) if os.path.islink(cache) else shutil.rmtree(cache, ignore_errors=True)
        if not all(stat.S_ISDIR(_mode(Path(place, name))) for name in folders):
            return False
        for name in names:
            path = Path(place, name)
            entry = path.relative_to(folder).as_posix()
            if entry not in files or not stat.S_ISREG(_mode(path)):
                return False
            if path.read_bytes() != files[entry]:
                return False
            found.add(entry)
    return found == files.keys()


def _mode(path: Path) -> int:
    """A path's mode, not that of a link's target; 0 if there is nothing."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


_put_aside: dict[str, dict[str, types.ModuleType]] = {}
"""The modules of folders that are not active, by the folder and their names."""


def activate(folder: Path) -> None:
    """Makes a folder that `unpack` returned the first place to import from.

    Modules that were loaded from another folder below the same root, another state of the code,
    are put aside, so that the next import reads this one. Those of this folder that were put
    aside before come back as they were.
    """
    own, root = _inside(folder), _inside(folder.parent)
    places = [place for place in sys.path if not _inside(place).startswith(root)]
    sys.path[:] = [str(folder.resolve()), *places]
    for name, module in list(sys.modules.items()):
        files = [
            module_attribute(module, "__file__"),
            *(module_folders(module) or ()),
        ]
        used = [_real_file(file) for file in files if isinstance(file, str)]
        others = [file for file in used if file.startswith(root) and not file.startswith(own)]
        if others:
            place = os.path.join(root, others[0][len(root) :].partition(os.sep)[0], "")
            _put_aside.setdefault(place, {})[name] = module
            _forget(name)
    back = _put_aside.pop(own, {})
    sys.modules.update(back)
    for name, module in back.items():
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).setdefault(last, module)
    importlib.invalidate_caches()


def discard(folder: Path) -> None:
    """Drops the modules of a folder that is not active, so that their memory can be freed."""
    _put_aside.pop(_inside(folder), None)


def _forget(name: str) -> None:
    module = sys.modules.pop(name)
    package, _, last = name.rpartition(".")
    # A namespace package moves to the new folder, and would keep the old module as its attribute.
    if vars(sys.modules.get(package, module)).get(last) is module:
        delattr(sys.modules[package], last)


def _inside(path: str | Path) -> str:
    return os.path.join(os.path.realpath(path), "")


@functools.lru_cache(maxsize=1 << 16)
def _real_file(path: str) -> str:
    """The real path of a module's file or folder, which stays the same while it is loaded."""
    return _inside(path)


def load(payload: bytes) -> Any:
    """Unpickles what `pack` pickled; its folder must be active."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

    return cloudpickle.loads(payload)
