"""What stands in the way of a run, found all at once before anything is leased or loaded."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vane_dagster.compute.admission import misfit
from vane_dagster.compute.api import Backend, Capacity
from vane_dagster.compute.code_digest import Versions
from vane_dagster.compute.placement import Bundle
from vane_dagster.compute.versions import disagreements
from vane_dagster.errors import ComputeError, PreflightError, StoreError, VaneError, names
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.definition import pool_identity
from vane_dagster.storage.filesystem import TEMPORARY, Location
from vane_dagster.storage.store import Store

_ASKERS = 16


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way of a run.

    Attributes:
        culprit: What it concerns: a stage, a folder, a node.
        problem: What is expected against what there is.
        fix: What to do about it; empty where `problem` says it.
        place: The folder that it is about, so that it is not told twice.
    """

    culprit: str
    problem: str
    fix: str = ""
    place: str = ""

    def __str__(self) -> str:
        told = f"{self.culprit}: {self.problem}" if self.culprit else self.problem
        return f"{told}. {self.fix}" if self.fix else told


@dataclass(frozen=True)
class Checked:
    """What the checks found, and what they made on the way that the run needs.

    Attributes:
        capacity: What the cluster has.
        code: The packed code of each stage that runs some.
        findings: All that stands in the way.
    """

    capacity: Capacity
    code: Mapping[str, CodeBundle]
    findings: Sequence[Finding] = field(default_factory=tuple)


def check_all(
    pipeline: Pipeline,
    stages: Sequence[str],
    partitions: Mapping[str, str | None],
    store: Store,
    backend: Backend | None,
) -> Checked:
    """Looks for all that stands in the way of computing some stages.

    Nothing is leased, loaded or left behind.

    Args:
        pipeline: The pipeline.
        stages: The stages that have something to compute.
        partitions: A partition of each stage that writes, whose target stands for all.
        store: Where parts and manifests go.
        backend: Where the work is done; None where it is known to fail.
    """
    with ThreadPoolExecutor(max_workers=_ASKERS) as threads:
        there = threads.submit(backend.versions) if backend else None
        written = [
            threads.submit(_not_writable, culprit, location)
            for culprit, location in _written(pipeline, stages, partitions, store)
        ]
        code, findings = packed(pipeline, stages)
        capacity = Capacity((), 0)
        if backend is not None:
            capacity = backend.capacity()
            findings += too_large(pipeline, stages, capacity, backend.beyond)
        for asked in written:
            findings += asked.result()
        if there is not None:
            findings += _versions(there.result)
    return Checked(capacity, code, tuple(findings))


def beyond(findings: Sequence[Finding], errors: Sequence[VaneError]) -> list[Finding]:
    """The findings that errors raised before do not tell already."""
    told = [str(error) for error in errors]
    return [f for f in findings if not (f.place and any(f.place in text for text in told))]


def refuse(findings: Sequence[Finding | VaneError]) -> None:
    """Raises all findings as one error, if there are any.

    Raises:
        PreflightError: With a line for each finding, each told once.
    """
    told = tuple(dict.fromkeys(str(finding) for finding in findings))
    if not told:
        return
    if len(told) == 1:
        raise PreflightError(told[0], told)
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(told, 1))
    raise PreflightError(
        f"{len(told)} things stand in the way of this run; nothing was computed:\n{listed}", told
    )


def packed(
    pipeline: Pipeline, stages: Sequence[str]
) -> tuple[dict[str, CodeBundle], list[Finding]]:
    """Packs the code of each stage that runs some, and tells of all that cannot be."""
    code: dict[str, CodeBundle] = {}
    findings = []
    for stage in stages:
        spec = pipeline[stage].spec
        if not spec.runs_udf:
            continue
        udf = spec.udf
        payload = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
        try:
            code[stage] = pack(spec.code(pipeline).modules, payload)
        except VaneError as error:
            findings.append(Finding(f"stage '{pipeline.name}/{stage}': {udf.name}", str(error)))
    return code, findings


def too_large(
    pipeline: Pipeline,
    stages: Sequence[str],
    capacity: Capacity,
    beyond: Callable[[Sequence[Bundle]], str | None] | None = None,
) -> list[Finding]:
    """The pools that the cluster cannot hold even alone, with the stages that ask for them.

    Args:
        pipeline: The pipeline.
        stages: The stages that have something to compute.
        capacity: What the cluster has.
        beyond: See `misfit`.
    """
    asked: dict[tuple[str, int], list[str]] = {}
    for stage in stages:
        spec = pipeline[stage].spec
        if spec.runs_udf:
            least = spec.concurrency[0] if spec.concurrency else 1
            asked.setdefault((pool_identity(pipeline, spec), least), []).append(stage)
    findings = []
    for (_, least), who in asked.items():
        spec = pipeline[who[0]].spec
        assert spec.runs_udf
        most = max(least, spec.concurrency[1] if spec.concurrency else 1)
        asking = (capacity, spec.udf.name, (least, most), spec.resources.bundle())
        if told := misfit(*asking, beyond):
            where = f"stage{'s' * (len(who) > 1)} {names(f'{pipeline.name}/{s}' for s in who)}"
            findings.append(Finding(where, told))
    return findings


def _written(
    pipeline: Pipeline,
    stages: Sequence[str],
    partitions: Mapping[str, str | None],
    store: Store,
) -> list[tuple[str, Location]]:
    """The folders that a run writes into: the store's, and one target of each `write` stage."""
    found = [(f"store of pipeline {pipeline.name!r}", store.root.child(pipeline.name))]
    for stage in stages:
        if stage not in partitions:
            continue
        if publisher := pipeline[stage].spec.publisher(partitions[stage]):
            label = f"target of stage '{pipeline.name}/{stage}'"
            found += [(label, folder) for folder in publisher.written]
    return found


def _not_writable(culprit: str, location: Location) -> list[Finding]:
    """Writes and deletes an empty file, whose name every listing of ours passes over."""
    try:
        if location.is_local:
            _try_local(location)
        else:
            name = f"{TEMPORARY}{secrets.token_hex(6)}"
            location.write(name, b"")
            location.delete([name])
    except OSError as error:
        fix = "Check the path, its permissions, and that there is room"
        told = f"{location.url!r} cannot be written: {_brief(error)}"
        return [Finding(culprit, told, fix, location.url)]
    except StoreError as error:
        return [Finding(culprit, str(error), place=location.url)]
    return []


def _try_local(location: Location) -> None:
    """Makes no folder: it tries the first above the location that there is."""
    folder = location.path
    while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    path = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(6)}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.unlink(path)


def _brief(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"


def _versions(ask: Callable[[], Mapping[str, Versions | str]]) -> list[Finding]:
    """What the nodes have other than this process; a node that cannot tell gives its error."""
    try:
        there = ask()
    except ComputeError as error:
        return [Finding("", str(error))]
    return [Finding(node, problem, fix) for node, problem, fix in disagreements(there)]
