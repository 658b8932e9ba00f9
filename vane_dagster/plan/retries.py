"""Fragment keys over generations, and fragments of which only the rows that failed are done again.

A forced run raises a stage's generation for all of its fragments. A run that tries failed rows
again raises it too, but fragments without any keep their key and so their part. So the parts of a
manifest may be of several generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import Manifest, PartInfo
from vane_dagster.plan.definition import digest
from vane_dagster.plan.plan import Part


@dataclass(frozen=True)
class FragmentKeys:
    """The keys of a stage's fragments.

    Attributes:
        keys: A key for each.
        mends: Former parts of those whose failed rows alone are done again, by index.
    """

    keys: tuple[str, ...]
    mends: dict[int, Part] = field(default_factory=dict)


def has_faults(manifest: Manifest) -> bool:
    """Whether a partition has rows that could not be computed."""
    return any(part.faults for part in manifest.parts)


def fragment_keys(
    definition: str,
    generation: int,
    upstream: Sequence[Sequence[str]],
    former: Manifest | None,
    folder: Location,
    retry: bool,
) -> FragmentKeys:
    """The keys of a stage's fragments in a generation.

    Args:
        definition: The stage's.
        generation: The stage's in this run.
        upstream: For each stage above the keys of its fragments.
        former: The manifest in force, whose parts of former generations are kept; None to keep
            none.
        folder: Where its parts are.
        retry: Whether the failed rows of its parts are done again.
    """
    parts = {part.key: part for part in former.parts} if former else {}
    keys: list[str] = []
    mends: dict[int, Part] = {}
    for above in zip(*upstream):
        newest = digest(definition, generation, *above)
        known = _kept(definition, generation, above, parts) or newest
        if retry and known != newest and parts[known].faults:
            mends[len(keys)] = Part(folder, parts[known])
            known = newest
        keys.append(known)
    return FragmentKeys(tuple(keys), mends)


def _kept(
    definition: str, generation: int, above: Sequence[str], parts: Mapping[str, PartInfo]
) -> str | None:
    """The key of the part that is kept of a fragment, of this generation or a former one."""
    for made_in in range(generation, -1, -1) if parts else ():
        key = digest(definition, made_in, *above)
        if key in parts:
            return key
    return None
