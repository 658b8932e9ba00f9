"""The keys of a stage's fragments: what is computed from equal keys is computed once."""

from __future__ import annotations

from collections.abc import Sequence

from vane_dagster.fingerprint.hashing import digest


def fragment_keys(
    definition: str,
    generation: str,
    upstream: Sequence[Sequence[str]],
) -> tuple[str, ...]:
    """Return the keys of a stage's fragments in a generation."""
    return tuple(digest(definition, generation, *above) for above in zip(*upstream))
