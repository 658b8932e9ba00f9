"""Versions and the code digest that a driver, the pool manager and its workers must share.

Workers and the pool manager outlive runs, so a driver may meet processes that were started from
other code. The digest covers all files of this package.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path


@functools.lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """The versions in this process that must be the same in the driver and in workers."""
    import pyarrow as pa
    import ray

    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "Ray": ray.__version__,
        "pyarrow": pa.__version__,
        "vane-dagster (digest of its code)": protocol(),
    }


def disagreement(driver: Mapping[str, str]) -> str:
    """Return how this process's versions differ from the driver's; empty if they do not."""
    here = {name: versions()[name] for name in driver}
    if here == driver:
        return ""
    return (
        f"the driver has {dict(driver)}; the workers have {here}. Restart the driver if it was "
        "started before an upgrade; otherwise install its versions there, or run it from that "
        "environment"
    )


@functools.lru_cache(maxsize=1)
def protocol() -> str:
    """Code digest of this process's package on disk, as of the first call."""
    return code_digest(Path(__file__).resolve().parent.parent)


def code_digest(package: Path) -> str:
    """Digest of the names and the contents of a package's Python files, in 12 hex digits."""
    state = hashlib.blake2b(digest_size=6)
    for name in sorted(glob.glob("**/*.py", root_dir=package, recursive=True)):
        content = (package / name).read_bytes()
        state.update(f"{name}\n{len(content)}\n".encode())
        state.update(content)
    return state.hexdigest()
