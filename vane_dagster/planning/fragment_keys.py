"""Fragment keys across generations.

A forced run raises a stage's generation for all of its fragments. A run that retries quarantined
rows raises it too, but fragments without failed rows keep their key and so their part. The parts of
one manifest can therefore be of several generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.storage.manifest import Manifest, PartInfo


def has_faults(manifest: Manifest) -> bool:
    """Return whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definition: str,
    generation: int,
    upstream: Sequence[Sequence[str]],
    former: Manifest | None,
    retry: bool,
) -> tuple[str, ...]:
    """Return the keys of a stage's fragments in a generation."""
    parts = {part.key: part for part in former.parts} if former else {}
    keys: list[str] = []
    for above in zip(*upstream):
        own = digest(definition, generation, *above)
        known = _kept(definition, generation, above, parts) or own
        if retry and known != own and parts[known].faults:
            known = own
        keys.append(known)
    return tuple(keys)


def _kept(
    definition: str,
    generation: int,
    above: Sequence[str],
    parts: Mapping[str, PartInfo],
) -> str | None:
    """Return the key of the part that a fragment keeps, of this generation or a former one."""
    for made_in in range(generation, -1, -1) if parts else ():
        if (key := digest(definition, made_in, *above)) in parts:
            return key
    return None
