"""The keys of a stage's fragments: what is computed from equal keys is computed once."""

from __future__ import annotations

from collections.abc import Sequence

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.storage.manifest import Manifest


def has_faults(manifest: Manifest) -> bool:
    """Return whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definition: str,
    generation: str,
    upstream: Sequence[Sequence[str]],
) -> tuple[str, ...]:
    """Return the keys of a stage's fragments in a generation."""
    return tuple(digest(definition, generation, *above) for above in zip(*upstream))
