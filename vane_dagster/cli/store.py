"""``vane-dagster store``: maintenance of a store."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from vane_dagster._texts import count, minute, table
from vane_dagster.cli.options import AS_JSON, print_json
from vane_dagster.errors import names
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.read import open_store
from vane_dagster.storage import contents
from vane_dagster.storage.gc import GcPolicy, GcReport, collect
from vane_dagster.storage.promotion import Promotion

_RESULTS = ["STAGE", "PARTITION", "PARTITIONS", "ROWS", "PARTS", "BYTES", "LAST COMMIT"]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Return the seconds of a number and its unit, such as "7d"; 0 needs none."""
    given = "0s" if text.strip() == "0" else text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", given)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a duration; expected a number with s, m, h or d, such as 7d"
        )
    return float(match.group(1)) * _UNITS[match.group(2)]


@click.group()
def store() -> None:
    """List and clean a store, and promote a branch."""


@store.command()
@click.argument("root")
@click.option(
    "--keep",
    type=duration,
    default="7d",
    show_default=True,
    help="How long unfinished work and former versions are kept at least.",
)
@click.option(
    "--grace",
    type=duration,
    default="1d",
    show_default=True,
    help="Time between marking a part and deleting it; must be longer than any run.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@AS_JSON
def gc(root: str, as_json: bool, **policy: Any) -> None:
    """Remove parts of the store at ROOT that are not needed any more.

    Run gc regularly, for example daily. A part is needed as long as a manifest names it that is in
    force, was superseded within --keep, or led to one in force elsewhere. Other parts are marked
    once they are older than --keep, so that runs do not use them any more. A gc at least --grace
    later deletes them.

    Other files, such as unfinished files of killed runs, answers of batches, and copies of local
    files that arguments name, are deleted once no run has needed them for --keep and --grace
    together. In the targets of write stages, only files that killed runs left in
    _vane_staging are deleted. With --json, each line is an object with the names and sizes of the
    files.
    """
    terms = GcPolicy(time.time(), **policy)
    stages, changed = 0, False
    would = "would have " * terms.dry_run
    for stage in collect(open_store(root, "ROOT"), terms):
        stages += 1
        if as_json:
            print_json(asdict(stage), indent=None)
            continue
        changes = _changes(stage)
        if changes:
            changed = True
            counted = [f"{verb} {_count(files, word)}" for verb, files, word in changes]
            click.echo(f"{stage.stage}: {would}{', '.join(counted)}")
        for url, reason in stage.unreadable.items():
            click.echo(f"{stage.stage}: passed over the target {url!r}: {reason}", err=True)
    if not stages:
        raise click.ClickException(
            f"{root!r} holds no stage of any pipeline; is it a store's root?"
        )
    if not (changed or as_json):
        click.echo(f"Nothing is to be deleted or marked in {count(stages, 'stage')}.")


@store.command("ls")
@click.argument("root")
@click.argument("path", default="")
@AS_JSON
def list_results(root: str, path: str, as_json: bool) -> None:
    """List the results in force in the store at ROOT, by stage or, for one stage, by partition.

    PATH is a pipeline, or a stage such as docs/embedding. Rows, parts and bytes are those that the
    manifests name. With --json, each line is an object.
    """
    lines, opened = [_RESULTS], open_store(root, "ROOT")
    for each in contents.results(opened, path):
        if as_json:
            print_json(asdict(each), indent=None)
        texts = [f"{n:,}" for n in (each.partitions, each.rows, each.parts, each.bytes)]
        lines.append([each.stage, each.partition or "-", *texts, minute(each.committed_at)])
    if not lines[1:]:
        raise click.ClickException(
            f"{opened.described} has no stage at {path!r}; is it a store's root?"
        )
    if not as_json:
        click.echo(table(lines))


@store.command()
@click.argument("root")
@click.argument("pipeline")
@click.argument("partitions", nargs=-1)
@click.option("--before", default="", help="Partitions whose key is less than this text.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
def forget(root: str, pipeline: str, partitions: Sequence[str], before: str, dry_run: bool) -> None:
    """Delete all versions of PARTITIONS of PIPELINE, in all stages, from the store at ROOT.

    PIPELINE may name one stage, such as docs/embedding. Without PARTITIONS and --before, the whole
    stage is then deleted: use this for the old name of a renamed stage.

    gc then removes the files. Batches of a whole stage are deleted too: cancel them before, if they
    are in flight. Published tables and Dagster's record of the partitions are not
    changed: delete rows there yourself, and wipe the partitions in Dagster's UI.

    Example: vane-dagster store forget s3://lake/.vane docs --before 2026-01-01
    """
    if not (partitions or before or "/" in pipeline.strip("/")):
        raise click.UsageError(
            f"name partitions of {pipeline!r} or give --before, or name one of its stages, such as "
            f"{pipeline}/embedding, to delete all of it"
        )
    forgotten = list(
        contents.forget(open_store(root, "ROOT"), pipeline, partitions, before, dry_run)
    )
    for stage in dict.fromkeys(each.stage for each in forgotten):
        own = [each for each in forgotten if each.stage == stage]
        rows = sum(each.rows for each in own)
        would = "would be " * dry_run
        partitions_of = count(sum(each.partitions for each in own), "partition")
        click.echo(f"{stage}: {partitions_of} {would}forgotten, {rows:,} rows")
    absent = [key for key in partitions if key not in {each.partition for each in forgotten}]
    if absent or not forgotten:
        which = f"partition {names(absent)}" if absent else "such partition"
        raise click.ClickException(f"{root!r} has no {which} of {pipeline!r}")


@store.command()
@click.argument("branch", metavar="FROM")
@click.argument("target", metavar="TO")
@click.argument("pipeline")
def promote(branch: str, target: str, pipeline: str) -> None:
    """Put the results of a branch for PIPELINE in force in the fallback of the branch.

    FROM is the root of the branch, and TO the root of its fallback. Manifests and the parts that
    they name are copied; nothing is computed. The promotion is refused if the versions in force in
    TO are not those that the branch started from. If the command is killed, run it again. The next
    run of the partitions with TO publishes the write stages and reports materializations to
    Dagster.

    Example: vane-dagster store promote s3://lake/dev/feature-x s3://lake/.vane docs
    """
    opened = FragmentStore(root=branch, fallback=target).open()
    promoted = [*Promotion(opened, open_store(target, "TO"), pipeline).carry_out()]
    for stage in dict.fromkeys(each.stage for each in promoted):
        of_stage = [each for each in promoted if each.stage == stage]
        parts = {part.name: part.bytes for each in of_stage for part in each.parts}
        before = sum(each.was_in_force for each in of_stage)
        text = f"{count(len(of_stage) - before, 'partition')} promoted"
        text += f", {before:,} promoted before" * bool(before)
        click.echo(f"{pipeline}/{stage}: {text}, copied {_count(parts, 'part')}")
    click.echo("Nothing is published or reported yet; the next run of the partitions there does it")


def _changes(stage: GcReport) -> list[tuple[str, dict[str, int], str]]:
    """Return what was done with which files, by the word for them."""
    listed = [
        ("deleted", stage.deleted, "part"),
        ("deleted", stage.manifests, "former manifest"),
        ("deleted", stage.temporaries, "unfinished file"),
        ("deleted", stage.files, "other file"),
        ("marked", stage.condemned, "part"),
    ]
    return [each for each in listed if each[1]]


def _count(files: dict[str, int], word: str) -> str:
    size = sum(files.values()) / (1 << 20)
    return f"{count(len(files), word)} ({size:,.1f} MiB)"
