"""`File`: a file that a user's function opens in a worker.

Rows hold paths, never open files or credentials. While a task runs, the worker knows the files of
its rows (`TaskFiles`), so `File` opens them with the source's storage options, and the worker
verifies afterwards that they did not change.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any

from vane_dagster._arguments import text
from vane_dagster._private_folder import new_temporary_file
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import SourceReader
from vane_dagster.storage.filesystem import StoragePath, protocol_of
from vane_dagster.storage.manifest import FileRecord

_LOCAL = "file://"


class File:
    """A file on a local disk or any fsspec file system. Nothing is opened before it is read.

    A function receives one for each parameter that is annotated with this class; in other code,
    make it from a row's path: ``vd.File(row["path"])``. In a stage, files of the pipeline's own
    source are opened with the source's storage options.

    The parameter ``file`` receives the file of the column ``path``. A parameter with another name
    receives the file of the column with its name, or of the column that ``columns={...}`` gives it.
    Paths in columns of another source, such as a table of URLs, can be opened too. Rows then depend
    on the text of the URL, and a file that is replaced at this URL is not detected.

    Args:
        path: A local path or fsspec URL.
        storage_options: Options of the fsspec file system. Default: those of the source.

    Attributes:
        path: The path or URL.

    Example:
        >>> def words(file: vd.File) -> int:
        ...     return len(file.read().split())
    """

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.path = text("vd.File", "path", os.fspath(path), "a local path or a URL")
        known = TaskFiles.options_of(self.path)
        self._file = StoragePath(self.path, known if storage_options is None else storage_options)

    @property
    def name(self) -> str:
        """The last component of the path, such as "a.wav"."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """The suffix of the name, such as ".wav"; empty without one."""
        return PurePosixPath(self.path).suffix

    @property
    def size(self) -> int:
        """Size in bytes.

        Raises:
            OSError: If it cannot be read, such as FileNotFoundError.
        """
        return int(self._file.fs.size(self._file.path))

    def open(self, mode: str = "rb", encoding: str | None = None) -> IO[Any]:
        """Open the file to read it; remote files are read in blocks as needed.

        Args:
            mode: "rb" for bytes, "r" for text.
            encoding: Encoding of text. Default: UTF-8.

        Raises:
            ValueError: If `mode` is neither "rb" nor "r".
            OSError: If it cannot be opened, such as FileNotFoundError.
        """
        if mode not in ("rb", "r", "rt"):
            raise ValueError(f"vd.File.open: mode is {mode!r}; expected 'rb' or 'r': it only reads")
        file = self._file
        opened: IO[Any]
        if file.is_local:
            opened = open(file.path, "rb")  # noqa: SIM115  # the caller closes it
        else:
            opened = with_retries(functools.partial(file.fs.open, file.path, "rb"))
        return opened if mode == "rb" else io.TextIOWrapper(opened, encoding or "utf-8")

    def read(self) -> bytes:
        """Return the content.

        Raises:
            OSError: If it cannot be read, such as FileNotFoundError.
        """
        file = self._file
        return bytes(with_retries(functools.partial(file.fs.cat_file, file.path)))

    def to_tempfile(self) -> Any:
        """Copy the content to a local temporary file, for libraries that need a path.

        Returns:
            A file like those of `tempfile.NamedTemporaryFile`, open at its beginning. Its ``name``
            has the file's suffix. It is deleted when it is closed, so use it in a ``with`` block.

        Raises:
            OSError: If it cannot be read, such as FileNotFoundError.
        """
        copied = new_temporary_file(self.suffix)
        try:
            with self.open() as stream:
                shutil.copyfileobj(stream, copied, 1 << 20)
            copied.flush()
            copied.seek(0)
        except BaseException:
            copied.close()
            raise
        return copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"File({self.path!r})"


class TaskFiles:
    """The files of the rows of a task.

    Attributes:
        used: URLs of the files for which code has made a `File`.
    """

    _active: tuple[TaskFiles, ...] = ()
    _lock = threading.Lock()

    def __init__(self, source: SourceReader, files: Sequence[FileRecord]) -> None:
        self.source = source
        self._files = {file.url: file for file in files}
        self._protocol = protocol_of(files[0].url) if files else ""
        self.used: set[str] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the files known to each `File` of the process, in any thread."""
        with self._lock:
            TaskFiles._active = (*TaskFiles._active, self)
        try:
            yield
        finally:
            with self._lock:
                others = [each for each in TaskFiles._active if each is not self]
                TaskFiles._active = tuple(others)

    @classmethod
    def options_of(cls, path: str) -> Mapping[str, Any]:
        """Return the storage options of a path, and record its use.

        They are those of the task with that file; else those of a task with files of the same
        protocol.
        """
        url = url_of(path)
        having = [each for each in cls._active if url in each._files]
        for each in having:
            each.used.add(url)
        protocol = protocol_of(url)
        others = [each for each in cls._active if each._protocol == protocol]
        chosen = next(iter(having or others), None)
        return {} if chosen is None else chosen.source.options_for(url)

    def records(self, paths: Collection[Any] = ()) -> list[FileRecord]:
        """Return the files that may have been read."""
        local = {url for path in paths if path and (url := url_of(path)).startswith(_LOCAL)}
        return [file for url, file in self._files.items() if url in self.used or url in local]


def read_listed(path: str) -> bytes:
    """Return the content of a file that the pipeline's source lists."""
    if not any(url_of(path) in each._files for each in TaskFiles._active):
        raise ValueError(
            "the row names a file that the pipeline's source does not list, so its changes would "
            "not be detected. List the files with vd.files, or read them in a function of an "
            "upstream stage; URLs that the model's server fetches need fetch_by_provider=True"
        )
    return File(path).read()


def path_of(url: str) -> str:
    """Return the path of a file as rows hold it: local files without ``file://``."""
    return url.removeprefix(_LOCAL)


def url_of(path: str) -> str:
    """Return the URL of a path, as listings name it."""
    return path if "://" in path else f"{_LOCAL}{os.path.abspath(os.path.expanduser(path))}"
