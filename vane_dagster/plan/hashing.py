"""Digests that are the same in every process: of parts, of files, of model folders."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A file that was written less than this ago can change again without a new time stamp.
_CLOCK_GRAIN_NS = 100_000_000
_BLOCK = 1 << 20
_MODEL_FILES = ("config.json", "modules.json")
_MODEL_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".onnx",
    ".gguf",
    ".joblib",
    ".pkl",
)


def combine(tag: str, *parts: str | bytes) -> str:
    """Hashes a tag and parts, each with its length, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in (tag, *parts):
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


class FileCache(Generic[T]):
    """Remembers what was computed from a file until its size, time or inode changes."""

    def __init__(self, compute: Callable[[str], T]) -> None:
        self._compute = compute
        self._held: dict[str, tuple[tuple[int, int, int], T]] = {}

    def get(self, path: str) -> T:
        """Returns the value for the file as it is on disk now.

        Raises:
            OSError: The file cannot be read.
        """
        stat = os.stat(path)
        signature = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        held = self._held.get(path)
        if held is not None and held[0] == signature:
            return held[1]
        settled = time.time_ns() - stat.st_mtime_ns > _CLOCK_GRAIN_NS
        value = self._compute(path)
        if settled:
            self._held[path] = (signature, value)
        return value


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


_files = FileCache(_hash_file)


def file_digest(path: str) -> str:
    """Returns the sha256 of a file's content, cached by its path, size, time and inode."""
    return _files.get(path)


def local_content(path: str) -> str | None:
    """Returns the digest of the file or model folder at a path, or None if there is none.

    A folder counts as a model when weights or a model's config lie directly in it; hidden files
    (download caches, version control) are left out.
    """
    if os.path.isfile(path):
        return combine("file", file_digest(path))
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
        return None
    if not any(map(_is_model_file, os.listdir(path))):
        return None
    parts: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            full = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(full):
                relative = os.path.relpath(full, path).replace(os.sep, "/")
                parts += [relative, file_digest(full)]
    return combine("folder", *parts)


def _is_model_file(name: str) -> bool:
    return name in _MODEL_FILES or name.endswith(_MODEL_SUFFIXES)
