"""Fragment keys across generations, and fragments with a row retry.

A forced run raises a stage's generation for all of its fragments. A run that retries quarantined
rows raises it too, but fragments without failed rows keep their key and so their part. The parts of
one manifest can therefore be of several generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Manifest, PartInfo


@dataclass(frozen=True)
class FragmentKeys:
    """The keys of a stage's fragments.

    Attributes:
        keys: The key of each fragment.
        row_retries: Former parts of the fragments that compute only their failed rows again, by
            fragment index.
    """

    keys: tuple[str, ...]
    row_retries: dict[int, Part] = field(default_factory=dict)


def has_faults(manifest: Manifest) -> bool:
    """Return whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definition: str,
    generation: int,
    upstream: Sequence[Sequence[str]],
    former: Manifest | None,
    folder: Location,
    retry: bool,
) -> FragmentKeys:
    """Return the keys of a stage's fragments in a generation."""
    parts = {part.key: part for part in former.parts} if former else {}
    keys: list[str] = []
    row_retries: dict[int, Part] = {}
    for above in zip(*upstream):
        own = digest(definition, generation, *above)
        known = _kept(definition, generation, above, parts) or own
        if retry and known != own and parts[known].faults:
            row_retries[len(keys)] = Part(folder, parts[known])
            known = own
        keys.append(known)
    return FragmentKeys(tuple(keys), row_retries)


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
