"""Versions and the code digest that a driver, the pool manager and its workers must share.

Workers and the pool manager outlive runs, so a driver may meet processes that were started from
other code. The digest covers all files of this package.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
        """Return whether a variable has a value."""
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
    """Digest of the names and the contents of a package's Python files, in 12 hex digits."""
    state = hashlib.blake2b(digest_size=6)
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        state.update(f"{file.relative_to(package).as_posix()}\n{len(content)}\n".encode())
        state.update(content)
    return state.hexdigest()
