"""Environment variables of workers, compared with the driver's without their values."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vane_dagster.worker.frameworks import THREADS

_PROCESS_VARIABLES = frozenset(
    {
        *("_", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TERM"),
        *("TMPDIR", "USER", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("PYTHONBREAKPOINT", "SPT_NOENV"),
        *THREADS,
    }
)
"""Variables of the process or machine, and those that Ray or a worker sets in each worker."""
_PROCESS_PREFIXES = ("RAY_", "VANE_DAGSTER_")


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

    def differing(self, candidates: Iterable[str]) -> list[str]:
        """Return the variables that have another value in this process."""
        here = dict(os.environ)
        return sorted(
            name
            for name in set(candidates) - _PROCESS_VARIABLES
            if not name.startswith(_PROCESS_PREFIXES) and not self.equals(name, here.get(name))
        )


def _salted(salt: bytes, value: str) -> bytes:
    return hashlib.blake2b(os.fsencode(value), key=salt, digest_size=16).digest()
