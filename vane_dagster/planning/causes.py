"""Causes: why a stage's partition is not up to date, for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from vane_dagster._texts import in_partitions, listed
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.sources.files import file_version
from vane_dagster.storage.manifest import Component, FileRecord, Manifest, ManifestName
from vane_dagster.storage.stored_tables import identity_of
from vane_dagster.types.schema import type_name

Causes = Counter[str]
"""The number of partitions for each cause; for causes in `_FILES`, the number of files."""

FORCED, RETRIED, ALWAYS = "force", "retry_quarantined", 'reuse="none"'
LOST, INFERRED = "stored parts are missing", "its schema is inferred again"
"""What gives a stage another generation in a partition."""
GIVEN_UP = "a run that failed did not commit it"
UNPUBLISHED = "published files are missing from"
_FILES = ("new files", "changed files", "removed files")
_MAX_SHOWN = 5


def causes(
    former: Manifest | None,
    components: Sequence[Component],
    raised: str,
    files: Sequence[FileRecord],
    upstream: Mapping[str, str],
    undone: Sequence[str],
    schema: Iterable[pa.Field],
) -> Causes:
    """Return why a stage's partition differs from its manifest in force.

    `raised` is what gives it another generation, or empty; `upstream` has the plan's digest of each
    upstream stage; `undone` names its adoptions that were undone.
    """
    if former is None:
        return Counter({raised or "not computed before": 1})
    changes = changed(former.components, components)
    counts = Counter(f"{name} {change}" for name, change in changes.items())
    if raised:
        counts[raised] = 1
    if SOURCE in former.reads:
        counts += _changed_files(former.files, files)
    others = {} if raised in (FORCED, ALWAYS) else upstream
    for stage, digest in others.items():
        then = ManifestName.parse(former.upstream.get(stage, ""))
        if then is None or then.plan != digest:
            counts[f"upstream stage {stage!r} changed"] = 1
    types = _changed_types(former.schema, schema) if SOURCE in former.reads else []
    if not counts and [*former.undone] != [*undone]:
        counts["an adoption was undone"] = 1
    elif not counts:
        counts[f"the source's options{'' if types else ' or fragment_rows'} changed"] = 1
    return counts + Counter(types)


def changed(before: Iterable[Component], now: Iterable[Component]) -> Mapping[str, str]:
    """Return the components that changed or are new, then those that are gone, and which it is."""
    then, today = map(_by_name, (before, now))
    changes = {name: "changed" if name in then else "is now used" for name in today}
    changes |= {name: "is no longer used" for name in then if name not in today}
    return {name: how for name, how in changes.items() if then.get(name) != today.get(name)}


def _by_name(components: Iterable[Component]) -> Mapping[str, Sequence[str]]:
    """Return the digests of components by their names, which several may share."""
    digests = defaultdict[str, list[str]](list)
    for each in components:
        digests[str(each)].append(each.digest)
    return digests


def _changed_types(before: pa.Schema, now: Iterable[pa.Field]) -> list[str]:
    then, today = ({f.name: type_name(f.type) for f in each} for each in (before, now))
    changed = [name for name, kind in then.items() if today.get(name, kind) != kind]
    return [f"column {n!r} changed from {then[n]} to {today[n]}" for n in changed]


def _changed_files(before: Iterable[FileRecord], now: Iterable[FileRecord]) -> Causes:
    then = {file.url: file_version(file) for file in before}
    today = {file.url: file_version(file) for file in now}
    shared = then.keys() & today.keys()
    if (replaced := then.keys() ^ today.keys()) and all(map(identity_of, replaced)):
        return Counter({"rows of the source changed": 1})
    counts = (
        len(today.keys() - shared),
        sum(then[url] != today[url] for url in shared),
        len(then.keys() - shared),
    )
    return Counter({kind: count for kind, count in zip(_FILES, counts) if count})


def describe(due: Mapping[str | None, Mapping[str, int]], partitions: int) -> str:
    """Describe the causes of some of all partitions in one line, the most frequent first."""
    texts = []
    for cause, count in sum(map(Counter, due.values()), Counter[str]()).most_common():
        text = f"{count:,} {cause if count > 1 else cause[:-1]}" if cause in _FILES else cause
        keys = [key for key, each in due.items() if cause in each]
        texts.append(text if len(keys) == partitions else f"{text} in {in_partitions(keys)}")
    return listed(texts, _MAX_SHOWN)
