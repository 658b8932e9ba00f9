"""``vane-dagster logs``: what the workers of a stage wrote in a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import click
import dagster as dg

from vane_dagster._secrets import masked
from vane_dagster.cli.options import ADDRESS, AS_JSON, NAME, print_json
from vane_dagster.cli.pools import local_head
from vane_dagster.compute.connection import connect_address
from vane_dagster.compute.worker_logs import Section, of_cluster, of_head
from vane_dagster.orchestration.event_log import opened_run


@click.command()
@click.argument("run")
@click.argument("stage")
@NAME
@ADDRESS
@AS_JSON
def logs(run: str, stage: str, name: str | None, address: str | None, as_json: bool) -> None:
    """Print what the workers of STAGE, such as docs/embedding, wrote in RUN.

    RUN is the run's id, or its beginning. The command prints the complete standard output and
    error, including the output of native code, as long as the local head or the nodes of the
    cluster keep them. With LocalCompute, workers write to the output of their step. This is read,
    for all stages, from the instance of $DAGSTER_HOME.

    Example: vane-dagster logs 3f9c21aa docs/embedding
    """
    head = local_head(name, address)
    if head is None:
        connect_address(address, {})
    shown = ""
    sections = of_cluster(run, stage) if head is None else of_head(head, run, stage)
    for each in _sections(sections, run, stage):
        title = f"==> run {each.run}, {each.worker} on {each.node}, {each.file} <=="
        text = masked("\n".join(each.lines))
        if as_json:
            lines = text.split("\n") if text else []
            print_json({**each._asdict(), "lines": lines}, indent=None)
        elif each.lines:
            click.echo(text if title == shown else f"{title}\n{text}")
            shown = title
    if not shown and not as_json:
        click.echo(f"The workers of {stage} wrote nothing in the run {run}.")


def _sections(sections: Iterator[Section], run: str, stage: str) -> Iterator[Section]:
    """Yield sections of logs, or without any the output of the run's steps."""
    empty = True
    for section in sections:
        empty = False
        yield section
    if empty and os.environ.get("DAGSTER_HOME"):
        with opened_run(run) as (instance, id):
            planned = instance.all_logs(
                id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED
            )
            keys = {entry.get_dagster_event().asset_key for entry in planned}
            is_known = dg.AssetKey.from_user_string(stage) in keys
            for entry in instance.all_logs(id, of_type=dg.DagsterEventType.LOGS_CAPTURED):
                captured = entry.get_dagster_event().logs_captured_data
                place = instance.compute_log_manager.build_log_key_for_run(id, captured.file_key)
                log = instance.compute_log_manager.get_log_data(place)
                for stream, data in (("stdout", log.stdout), ("stderr", log.stderr)):
                    if data and is_known:
                        empty, text = False, data.decode(errors="replace")
                        step = f"step {', '.join(captured.step_keys or [])}"
                        yield Section(id, step, socket.gethostname(), stream, text.splitlines())
    if empty:
        raise click.ClickException(
            f"no worker has a log of {stage} in the run {run}. Logs are kept with the local head, "
            "or the nodes, that a run used (--name, --address); stages without code have none"
        )
