"""`diff`: two versions of a stage's rows, side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vane_dagster._arguments import list_of_names
from vane_dagster._keywords import known_keywords
from vane_dagster.checks.base import bound
from vane_dagster.checks.versions import Diff, Side, compare_versions
from vane_dagster.errors import StoreError
from vane_dagster.orchestration.read import asset_path, open_store
from vane_dagster.storage.filesystem import StoragePath, absolute_url
from vane_dagster.storage.reader import find_all, find_run
from vane_dagster.storage.store import Store

_RUN = re.compile(r"(run-)?[0-9a-f-]+")
LATEST = "latest"
"""The name of the version in force."""


@known_keywords("vd.diff")
def diff(
    stage: Any,
    before: str,
    now: str = LATEST,
    *,
    partitions: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    store: Any = None,
    tolerance: float = 0.0,
) -> Diff:
    """Compare two versions of a stage's stored rows by id. It reads the store and computes nothing.

    A version is one of these: the rows that a run has committed, named by the beginning of the
    run's id, until garbage collection removes them; the rows of another store, named by its root;
    or `"latest"`, the rows in force.

    Args:
        stage: As "docs/embedding", or a stage or its asset key.
        before: The first version.
        now: The second version. A name of hexadecimal digits and dashes, with or without
            "run-" before them, is a run; write a store with such a name as "./name".
        partitions: Keys of the partitions to compare. Default: those that both versions have.
        columns: The columns to compare. Default: those that both versions have, without
            the usage of prompts, whose seconds always differ.
        store: The store of the runs and of `"latest"`: a `FragmentStore`, or the URL of a root.
            Default: ``$VANE_DAGSTER_STORE``, else a folder of this user.
        tolerance: The largest difference of floating-point numbers, also inside of other values,
            relative to one plus their magnitude. All other values must be equal.

    Returns:
        The differences. Print them, display them in a notebook, or convert them to a dict.

    Raises:
        SchemaError: If neither version has a column of `columns`.
        StoreError: If there is no such version, the versions have no partition in common, their ids
            have different names or types, or files of a former version were collected.
    """
    location = "vd.diff"
    bound(location, "tolerance", tolerance)
    compared = list_of_names(location, "columns", columns)
    path = asset_path(stage, location)
    label = "/".join(path)
    wanted = None if partitions is None else [*dict.fromkeys(partitions)]
    sides = []
    for name in (before, now):
        if not isinstance(name, str):
            raise StoreError(
                f"{location}: a version is a {type(name).__name__}; expected the root of a store, "
                "a run's id or 'latest', which names the rows in force of store="
            )
        opened = open_store(store, location)
        if name != LATEST and _RUN.fullmatch(name):
            made = find_run(opened, path, name)
            manifests = {key: each for key, each in made.items() if key in (wanted or made)}
        else:
            if name != LATEST and (url := absolute_url(name)) != opened.root.url:
                opened = Store(StoragePath(url, opened.root.options_for(url)))
            manifests = find_all(opened, path, wanted)
        sides.append(Side(name, opened, manifests))
    return compare_versions(location, label, (sides[0], sides[1]), compared, tolerance)
