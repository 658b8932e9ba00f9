"""Fragment keys across generations.

A forced run raises a stage's generation for all of its fragments. A run that retries quarantined
rows raises it too, but fragments without failed rows keep their key and so their part. The parts of
one manifest can therefore be of several generations.

The names of patches count as if they were read too, in the fragments that may have their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.storage.manifest import Manifest


def has_faults(manifest: Manifest) -> bool:
    """Return whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definition: str,
    generation: int,
    upstream: Sequence[Sequence[str]],
    former: Manifest | None,
    retry: bool,
    patches: Sequence[Sequence[str]] = (),
) -> tuple[str, ...]:
    """Return the keys of a stage's fragments in a generation."""
    parts = {part.key: part for part in former.parts} if former else {}
    keys: list[str] = []
    for index, above in enumerate(zip(*upstream)):
        above += tuple(patches[index]) if patches else ()
        own = key = digest(definition, generation, *above)
        for made_in in range(generation, -1, -1) if parts else ():
            if (known := digest(definition, made_in, *above)) in parts:
                key = own if retry and parts[known].faults and made_in < generation else known
                break
        keys.append(key)
    return tuple(keys)
