"""The command that traces a row, for materialization metadata."""

from __future__ import annotations

import shlex

from vane_dagster._home import default_root
from vane_dagster.storage.filesystem import absolute_url
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store


def trace_command(store: Store, manifest: Manifest) -> str | None:
    """Return the command that traces the first sample row of a manifest; None if there is none."""
    label = f"{manifest.pipeline}/{manifest.stage}"
    id = manifest.sample[0].get(manifest.keys[0]) if manifest.sample else None
    # The command opens one root, and a row of a branch may come from the other.
    if id is None or id.endswith("…") or store.fallback is not None:
        return None
    words = ["vane-dagster", "trace", label]
    if manifest.partition is not None:
        words += ["--partition", manifest.partition]
    words += ["--id", id] if not id.startswith("-") else [f"--id={id}"]
    if store.root.url != absolute_url(default_root()):
        words += ["--store", store.root.url]
    command = shlex.join(words)
    return None if "`" in command or "\n" in command else command  # it is shown as code
