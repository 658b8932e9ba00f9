"""Fragment keys over generations, and fragments of which only the rows that failed are done again.

A forced run raises a stage's generation for all of its fragments. A run that tries failed rows
again raises it too, but fragments without any keep their key and so their part. So the parts of a
manifest may be of several generations. So they may be of several versions of the algorithm; see
`versions`.
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
        keys: For each the keys under which its part may be, the one to compute it under first.
        row_retries: Former parts of those whose failed rows alone are done again, by index.
    """

    keys: tuple[tuple[str, ...], ...]
    row_retries: dict[int, Part] = field(default_factory=dict)


def has_faults(manifest: Manifest) -> bool:
    """Whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definitions: Sequence[str],
    generation: int,
    upstream: Sequence[Sequence[str]],
    former: Manifest | None,
    folder: Location,
    retry: bool,
) -> FragmentKeys:
    """The keys of a stage's fragments in a generation.

    Args:
        definitions: The stage's, and those of former versions whose parts are taken for the same.
        generation: The stage's in this run.
        upstream: For each stage above the keys of its fragments.
        former: The manifest in force, whose parts of former generations and versions are kept; None
            to keep none.
        folder: Where its parts are.
        retry: Whether the failed rows of its parts are done again.
    """
    parts = {part.key: part for part in former.parts} if former else {}
    keys: list[tuple[str, ...]] = []
    row_retries: dict[int, Part] = {}
    for above in zip(*upstream):
        own = [digest(definition, generation, *above) for definition in definitions]
        known = _kept(definitions, generation, above, parts) or own[0]
        if retry and known != own[0] and parts[known].faults:
            row_retries[len(keys)] = Part(folder, parts[known])
            known = own[0]
        keys.append(tuple(dict.fromkeys([known, *own])))
    return FragmentKeys(tuple(keys), row_retries)


def _kept(
    definitions: Sequence[str],
    generation: int,
    above: Sequence[str],
    parts: Mapping[str, PartInfo],
) -> str | None:
    """The key of the part that is kept of a fragment, of this generation or a former one."""
    for made_in in range(generation, -1, -1) if parts else ():
        for definition in definitions:
            key = digest(definition, made_in, *above)
            if key in parts:
                return key
    return None
