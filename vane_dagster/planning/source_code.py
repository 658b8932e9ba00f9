"""Sources defined in user modules: their code is part of the keys, and is sent to the workers.

For the sources of this package, neither is needed: workers have the code, and only the files count
in the keys of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vane_dagster.fingerprint.bundle import pickled_by_value
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.sources import Source
from vane_dagster.storage.manifest import FragmentRecord


def source_definition(source: Source) -> str:
    """Return what determines the rows of given files; a new value recomputes the pipeline."""
    if _is_built_in(type(source)):
        return ""
    bases = [each for each in type(source).__mro__ if _is_built_in(each)]
    known = {name for base in bases for name in vars(base).get("__annotations__", ())}
    values = {n: v for n, v in sorted(vars(source).items()) if n not in known}
    unread = LocalFiles(read=False)
    code = code_identity(type(source), version=source.version, files=unread).digest
    return digest(code, value_digest(values, "source", unread))


def keyed(fragments: Sequence[FragmentRecord], definition: str) -> tuple[FragmentRecord, ...]:
    """Return fragments with identities that include the source's definition."""
    if not definition:
        return tuple(fragments)
    return tuple(replace(f, identity=digest(f.identity, definition)[:32]) for f in fragments)


def pack_source(source: Source) -> bytes:
    """Pickle a source's reader for the workers, by value if its class is in user code."""
    reader = source.for_workers()
    kind = type(reader)
    modules = () if _is_built_in(kind) else code_identity(kind, version="").modules
    return pickled_by_value(modules, reader)


def _is_built_in(kind: type) -> bool:
    return kind.__module__.startswith("vane_dagster.")
