"""Local files and folders that travel to the workers by content: `vd.local_file`."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import stat
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, TypeVar

from vane_dagster._keywords import known_keywords
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import CodeIdentityError, DefinitionError
from vane_dagster.fingerprint.files import MAX_FILES, file_digests, walk_files
from vane_dagster.servers.handle import HostUrls, ServerHandle
from vane_dagster.types.callables import captured_by

T = TypeVar("T")


@dataclass(frozen=True)
class LocalFile:
    """A local file or folder, as `local_file` declares it.

    Attributes:
        path: Its absolute path on the machine of the driver.
    """

    path: str

    def __fspath__(self) -> NoReturn:
        """Explain where the path can be used; called by libraries that expect a path."""
        raise DefinitionError(
            f"{self} is a path only in a worker that gets it as an argument: pass it in "
            "fn_constructor_args, fn_constructor_kwargs or fn_kwargs"
        )

    def __str__(self) -> str:
        return f"vd.local_file({self.path!r})"

    @property
    def name(self) -> str:
        """The name of the file or folder, which its copies keep."""
        return os.path.basename(self.path)

    def identity(self) -> str:
        """Return the digest of its name and present content; a missing file counts by its name."""
        # Workers compute identities too, when they import a pipeline, and use none of them.
        return self.name if is_worker() or not os.path.exists(self.path) else self.content().digest

    def content(self) -> FileContent:
        """Return its present content."""
        try:
            return self._content()
        except (OSError, UnicodeError) as error:
            raise CodeIdentityError(
                f"{self} cannot be read: {error}. Restore it, or correct the path"
            ) from error

    def _content(self) -> FileContent:
        is_file = stat.S_ISREG(os.stat(self.path).st_mode)
        paths = {"": self.path} if is_file else self._files()
        digests = file_digests(list(paths.values()), self.path, str(self))
        blobs = [
            Blob(name, digest, path, os.stat(path).st_size)
            for (name, path), digest in zip(paths.items(), digests)
        ]
        files = {blob.name: [blob.digest, blob.size] for blob in blobs}
        record = json.dumps({"name": self.name, "files": files}, sort_keys=True).encode()
        return FileContent(hashlib.sha256(record).hexdigest(), record, tuple(blobs))

    def _files(self) -> dict[str, str]:
        """Return the paths of a folder's files, by their names in it."""
        files: dict[str, str] = {}
        for name, path in islice(walk_files(os.path.realpath(self.path)), MAX_FILES + 1):
            if path is None:
                raise CodeIdentityError(
                    f"{self} contains something other than a file, such as a broken or circular "
                    f"link: {name}. Remove it, or name the folder that is used"
                )
            files[name] = path
        if not files:
            raise CodeIdentityError(
                f"{self} holds no files; hidden ones do not count. Name the folder with the content"
            )
        return files


@dataclass(frozen=True)
class Blob:
    """The content of one file.

    Attributes:
        name: Its name in the folder; empty for a file of its own.
        digest: The sha256 of its content.
        path: Its path on this machine.
        size: Its size in bytes.
    """

    name: str
    digest: str
    path: str
    size: int


@dataclass(frozen=True)
class FileContent:
    """The content of a `LocalFile` at one moment.

    Attributes:
        digest: The sha256 of `record`, by which pickled arguments name the content.
        record: A JSON object with the name, and the digest and size of each file; the format of
            `storage.shipped_files`.
        blobs: The files.
    """

    digest: str
    record: bytes = field(repr=False)
    blobs: tuple[Blob, ...] = field(repr=False)


@known_keywords("vd.local_file")
def local_file(path: str | os.PathLike[str]) -> Any:
    """Name a file or folder whose content is sent to the workers: weights, a tokenizer, labels.

    Pass it as an argument of a function or class, also inside of lists, dictionaries and
    dataclasses: ``fn_constructor_kwargs={"weights": vd.local_file("model.pt")}``. In the worker
    the argument is a `str`, the path of a read-only local copy with the same name, so workers do
    not need access to the original. Its content and its name are part of fragment keys, its folder
    is not. Hidden files of a folder are left out. With ``vd.Reuse(version=...)`` the content is not
    part of keys. A default value or a module's constant cannot be a local file.

    The file must exist when the stage is declared, unless the stage has `deps`, assets that may
    make it. If the file is edited while a run begins, the run stops.

    A run copies each content once into the store. Each node copies it once from there to its
    private folder, below ``TMPDIR``, and verifies its sha256 before the constructor runs; this time
    counts towards ``startup_timeout_s``. A folder has at most 100,000 files. Copies that no process
    uses are deleted a day after their last use, when another copy is made.

    Args:
        path: A file or folder on this machine, absolute or relative to the current folder.

    Raises:
        DefinitionError: It is not a path, empty, or a URL.
    """
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if not text or ("://" in text and not os.path.lexists(text)):
        raise DefinitionError(
            "vd.local_file was given no path; expected the path of a file or folder. Pass a URL "
            "itself as the argument, and open it in the worker"
        )
    return LocalFile(os.path.abspath(os.path.expanduser(text)))


def check_local_files(where: str, files: Iterable[LocalFile], made_later: bool) -> None:
    """Validate that local files can be read when they are declared."""
    if is_worker():  # the declaration of a pipeline whose functions it needs
        return
    for file in files:
        try:
            os.stat(file.path)
        except (OSError, ValueError) as error:
            if made_later and isinstance(error, FileNotFoundError):
                continue
            raise DefinitionError(
                f"{where}: {file} cannot be read: {error}. Correct the path, or name the asset "
                "that makes it in deps"
            ) from error


def found_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a type in arguments: in containers, objects and closures."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, kind):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _inside(item)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, HostUrls):
        return [value.handle]
    if isinstance(value, ServerHandle):
        return [value.command]
    if isinstance(value, types.FunctionType):  # not the names of its module
        return list(captured_by(value).values())
    return [] if isinstance(value, (type, types.ModuleType)) else gc.get_referents(value)
