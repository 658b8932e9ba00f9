"""The model of a worker, and which code it keeps."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pytest

from support.edits import Project
from vane_dagster._private_folder import private_folder
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.worker import host as host_module
from vane_dagster.worker import lifecycle
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.host import Host
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import CallUdf, TableRows, Work
from vane_dagster.worker.reports import LoadReport

SCHEMA = pa.schema({"id": pa.int64(), "out": pa.int64()})
MODEL = """
class Model:
    def __init__(self):
        self.first = 100

    def __call__(self, batch):
        return {"out": [n + self.first for n in batch["id"].to_pylist()]}
"""


class Worker:
    """A host in this process, and a driver that packs what is on disk for it."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.host = Host()
        self._path = list(sys.path)

    @contextlib.contextmanager
    def driver(self) -> Iterator[tuple[type, Sequence[str]]]:
        """Import the model as a driver does; yield it, with its modules."""
        path, module = list(sys.path), sys.modules.pop("defs", None)
        sys.path[:] = self._path
        found = self.project.load("Model")
        yield found, code_identity(found).modules
        self.project.forget()
        sys.path[:] = path
        if module is not None:
            sys.modules["defs"] = module

    def load(
        self, max_rss: int | None = None, **given: bool
    ) -> tuple[LoadReport, Callable[..., list[int]]]:
        """Load the model as a run does; return the report, and a function that calls it."""
        with self.driver() as (found, modules):
            bundle = pack(modules, (found, (), {}))
        model = ModelSpec("Model", True, bundle.payload, bundle.content, **given)
        report = self.host.load(
            LoadCall(model, bundle.archive, lifecycle=WorkerLifecycle(max_rss=max_rss))
        )
        return report, self.call

    def call(self, *ids: int, kept: bytes = b"") -> list[int]:
        table = pa.table({"id": pa.array(ids, pa.int64())})
        op = CallUdf(
            cloudpickle.dumps({}), None, BatchCall(), None, "one_to_one", 1, ("id",), ("out",)
        )
        op = replace(op, kept=kept)
        work = Work("stage 'docs/m', fragment 0", op, (TableRows(0),), SCHEMA, "id", None, True)
        rows, report = self.host.run(work, table)
        assert report.fault is None, report.fault
        assert rows is not None
        return rows["out"].to_pylist()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a host taps
    monkeypatch.setattr(OutputTap, "_instance", None)
    root = private_folder(tmp_path / "code")
    monkeypatch.setattr(host_module, "worker_folder", lambda kind: root)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    project = Project(tmp_path / "project")
    project.write(defs=MODEL)
    yield Worker(project)
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_a_run_with_an_equal_identity_uses_the_model_as_it_was_constructed(worker):
    first, call = worker.load()
    worker.project.edit("defs.py", "class Model", "UNRELATED = 1\n\nclass Model")
    second, again = worker.load()
    assert (first.warm, second.warm, second.outdated) == (False, True, "")
    assert (call(1), again(1)) == ([101], [101])
    assert not hasattr(sys.modules["defs"], "UNRELATED")


def test_a_forced_run_uses_no_model_that_other_files_constructed(worker):
    worker.load()
    assert worker.load(exact=True)[0].outdated == "", "the same code"
    worker.project.edit("defs.py", "class Model", "UNRELATED = 1\n\nclass Model")
    assert "was constructed by other code" in worker.load(exact=True)[0].outdated


def test_a_preview_has_the_methods_of_an_edited_class_on_the_instance(worker):
    worker.load()
    worker.host.instance.first = 200  # what a call has left in it
    worker.project.edit("defs.py", "n + self.first", "n - self.first")
    with worker.driver() as (edited, modules):
        payload = portable_payload(modules, edited)
    worker.load(is_kept=True)
    assert payload is not None
    assert worker.call(1, kept=payload) == [-199]
    assert worker.call(1) == [201], "the instance itself has its own methods"


def test_nothing_is_constructed_for_a_preview_of_a_former_instance(worker):
    report, call = worker.load(is_kept=True)
    assert "the instance of its former code has ended" in report.fault.message
    report, call = worker.load()
    assert (report.fault, call(1)) == (None, [101])


def test_a_limit_of_memory_that_a_fresh_worker_is_beyond_is_an_error(worker, monkeypatch):
    report, _ = worker.load(max_rss=1 << 20)
    expected = r"Model: its worker holds \d+ MiB of memory, max_rss=1 MiB, .* Raise max_rss"
    assert re.fullmatch(expected, report.fault.message)
    monkeypatch.setattr(lifecycle, "own_memory", lambda: 7 << 20)
    assert lifecycle.recycle_reason(WorkerLifecycle(max_rss=8 << 20), 9) == ""
    reason = lifecycle.recycle_reason(WorkerLifecycle(max_rss=6 << 20), 9)
    assert reason == "holds 7 MiB of memory, max_rss=6 MiB"
