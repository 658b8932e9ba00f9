"""The origin of a manifest's rows, from that manifest alone, for materialization metadata."""

from __future__ import annotations

import shlex

from vane_dagster._home import default_root
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.filesystem import absolute_url
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store
from vane_dagster.tracing.steps import markdown_table, utc


def sample_trace(store: Store, manifest: Manifest) -> str | None:
    """Return the origin of a partition's rows as a Markdown table, and a trace command.

    This reads nothing: it does not repeat the content of upstream manifests.
    """
    if not manifest.reads or not manifest.keys:
        return None
    lines = [_own(manifest)]
    for node in manifest.reads:
        label = f"{manifest.pipeline}/{node}"
        if node == SOURCE:
            lines.append([label, _files(manifest), "", "", "", ""])
        else:
            lines.append([label, f"manifest {manifest.upstream.get(node, '')}", "", "", "", ""])
    head = ["Stage", "Made of", "Run", "Code version", "Model", "Written"]
    command = trace_command(store, manifest)
    hint = f"\n\nTrace its first row: `{command}`" if command else ""
    return f"{markdown_table(head, lines)}{hint}"


def trace_command(store: Store, manifest: Manifest) -> str | None:
    """Return the command that traces the first sample row of a manifest; None if there is none."""
    label = f"{manifest.pipeline}/{manifest.stage}"
    id = manifest.sample[0].get(manifest.keys[0]) if manifest.sample else None
    if id is None or id.endswith("…") or "`" in id or "\n" in id:
        return None
    words = ["vane-dagster", "trace", label]
    if manifest.partition is not None:
        words += ["--partition", manifest.partition]
    words += ["--id", id] if not id.startswith("-") else [f"--id={id}"]
    if store.root.url != absolute_url(default_root()):
        words += ["--store", store.root.url]
    return shlex.join(words)


def _own(manifest: Manifest) -> list[str]:
    made = [part.made for part in manifest.parts if part.made]
    runs = list(dict.fromkeys(m.run_id for m in made)) or [manifest.run_id]
    written = [m.at for m in made] or [manifest.committed_at]
    times = list(dict.fromkeys([utc(min(written)), utc(max(written))]))
    model = manifest.model.get("name", "")
    if pool := manifest.model.get("pool"):
        model += f", pool {pool[:12]}"
    return [
        f"{manifest.pipeline}/{manifest.stage}",
        f"{_count(len(manifest.parts), 'part')}, {_count(manifest.rows, 'row')}",
        ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else ""),
        manifest.definition,
        model,
        " to ".join(times),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _files(manifest: Manifest) -> str:
    urls = {span.url for fragment in manifest.fragments for span in fragment.spans}
    if not urls:
        return "no rows"
    first = manifest.fragments[0]
    more = len(manifest.fragments) - 1
    hint = str(first)
    if not first.files:
        hint = f"rows {first.start:,} to {first.stop - 1:,} of {first.url}"
    return f"{hint}, and {more:,} more fragments of {len(urls):,} files" if more else hint
