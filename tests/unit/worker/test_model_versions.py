"""Several versions of a model's code in one worker process, over one constructed state."""

from __future__ import annotations

import codecs
import collections
import functools
import io
import itertools
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pyarrow as pa
import pytest

from support.edits import Project
from vane_dagster._private_folder import private_folder
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.constructor import constructor_identity
from vane_dagster.pipeline.contracts import BatchCall, CallStyle
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.pipeline.udf import make_udf
from vane_dagster.worker import host as host_module
from vane_dagster.worker.host import Host
from vane_dagster.worker.model_versions import MAX_VERSIONS, VersionLock, view
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.protocol import CallUdf, LoadReport, ModelSpec, TableRows, Work
from vane_dagster.worker.state_mark import state_fingerprint
from vane_dagster.worker.user_code import activate, discard, unpack

SCHEMA = pa.schema({"id": pa.int64(), "out": pa.int64()})
MODEL = """
LOADS = []

class Model:
    def __init__(self, start=0):
        LOADS.append(1)
        self.start, self.loads = start, len(LOADS)

    def __call__(self, batch):
        import parts.late
        from ours.near import ADDED

        out = [self.start + n + ADDED + parts.late.value() for n in batch["id"].to_pylist()]
        return {"id": batch["id"], "out": out}

def function(batch):
    import parts.late

    return {"id": batch["id"], "out": [parts.late.value()] * batch.num_rows}
"""
FILES = {
    "defs": MODEL,
    "parts__in__late": "def value():\n    from parts import later\n    return later.VALUE\n",
    "parts__in__later": "VALUE = 100\n",
    "ours__in____init__": "",
    "ours__in__near": "ADDED = 0\n",
}


class Worker:
    """A host in this process, and a driver that packs what is on disk for it."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.host = Host()
        self._path = list(sys.path)

    def packed(self, name: str, arguments: Any = ()) -> tuple[CodeBundle, Any, bool]:
        """What a driver sends that has a project's modules imported as they are on disk."""
        path, held = list(sys.path), {}
        for known in list(sys.modules):
            if known.partition(".")[0] in ("defs", "parts", "ours"):
                held[known] = sys.modules.pop(known)
        sys.path[:] = self._path
        try:
            found = self.project.load(name)
            packed = pack(code_identity(found).modules, (found, arguments, {}))
            udf = make_udf("here", found)
            return packed, udf, constructor_identity(found).shares_state
        finally:
            self.project.forget()
            sys.path[:] = path
            sys.modules.update(held)

    def load(
        self, name: str = "Model", shared: bool | None = None, exact: bool = False
    ) -> tuple[LoadReport, Callable[..., list[int]]]:
        """Loads a version as a run does; gives the report and how the run calls it."""
        bundle, udf, separable = self.packed(name)
        model = ModelSpec(
            name, udf.stateful, bundle.digest, bundle.payload,
            shares_state=separable if shared is None else shared, exact=exact,
        )  # fmt: skip
        report = self.host.load(model, bundle.archive, 0, {}, WorkerLifecycle(), {})
        return report, lambda *ids: self.call(model, *ids, style=udf.style)

    def call(self, model: ModelSpec, *ids: int, style: CallStyle = "plain") -> list[int]:
        table = pa.table({"id": pa.array(ids, pa.int64())})
        op = CallUdf(
            cloudpickle.dumps(((), {})), None, BatchCall(), None, "one_to_one", 4, ("id",),
            ("out",), version=model.version, style=style,
        )  # fmt: skip
        work = Work("stage 'docs/m', fragment 0", op, (TableRows(0),), SCHEMA, "id", None, True)
        rows, report = self.host.run(work, table)
        assert report.fault is None, report.fault
        assert not report.unhealthy_reason, report.unhealthy_reason
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
    project.write(**FILES)
    yield Worker(project)
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    sys.modules.pop("parts", None)


def loads() -> int:
    return len(sys.modules["defs"].LOADS)


def test_two_versions_of_the_call_share_what_is_constructed(worker):
    first, call = worker.load()
    assert call(1) == [101]
    assert loads() == 1
    worker.project.edit("defs.py", "self.start + n", "self.start - n")
    worker.project.edit("parts/later.py", "100", "200")
    worker.project.edit("ours/near.py", "0", "5")
    second, edited = worker.load()
    assert (first.warm, second.warm, second.outdated) == (False, True, "")
    for _ in range(3):  # neither has the modules of the other, those imported in calls neither
        assert edited(1) == [204]
        assert loads() == 0, "its own module has constructed nothing"
        assert call(1) == [101]
        assert loads() == 1


def test_a_version_that_is_there_is_not_imported_again(worker):
    _, call = worker.load()
    worker.project.edit("defs.py", "self.start + n", "self.start - n")
    _, edited = worker.load()
    assert edited(1) == [99]
    module = sys.modules["defs"]
    worker.load()
    assert call(1) == [101]
    assert sys.modules["defs"] is not module
    assert edited(1) == [99]
    assert sys.modules["defs"] is module


def test_functions_have_versions_too(worker):
    _, call = worker.load("function")
    assert call(1, 2) == [100, 100]
    worker.project.edit("parts/later.py", "100", "200")
    report, edited = worker.load("function")
    assert (report.warm, report.outdated) == (True, "")
    assert (edited(1), call(1), edited(1)) == ([200], [100], [200])


def test_a_way_of_answering_may_change(worker):
    _, call = worker.load()
    worker.project.edit("defs.py", "return {", "yield {")
    _, edited = worker.load()
    assert (edited(1), call(1), edited(1)) == ([101], [101], [101])


def test_a_forced_run_uses_nothing_that_other_code_has_constructed(worker):
    worker.load()
    assert worker.load(exact=True)[0].outdated == "", "the same code"
    worker.project.edit("defs.py", "self.start + n", "self.start - n")
    report, _ = worker.load(exact=True)
    assert "other code has constructed" in report.outdated
    assert worker.load()[0].outdated == ""


def test_code_that_cannot_be_separated_is_called_as_it_was_constructed(worker):
    """Its pool's identity covers all of it, so that nothing that matters has changed."""
    worker.project.edit("defs.py", "class Model:", "class Model:\n    KEPT = []\n")
    _, call = worker.load()
    worker.project.edit("defs.py", "LOADS = []", "LOADS = []\nUNRELATED = 1")
    report, edited = worker.load()
    assert (report.warm, report.outdated) == (True, "")
    assert (call(1), edited(1)) == ([101], [101])
    assert not hasattr(sys.modules["defs"], "UNRELATED")


def test_state_that_calls_have_changed_is_not_shared(worker):
    worker.project.edit("defs.py", "import parts.late", "import parts.late; self.n = 1")
    _, call = worker.load(shared=True)
    call(1)
    worker.project.edit("defs.py", "self.start + n", "self.start - n")
    report, _ = worker.load(shared=True)
    assert "calls of other code may have changed" in report.outdated
    assert call(1) == [101]


def test_state_that_calls_change_later_is_not_met_by_another_version(worker):
    grow = "import parts.late; d = [self.start]; d[0] = self.loads; self.__dict__['loads'] += 1"
    worker.project.edit("defs.py", "import parts.late", grow)
    _, call = worker.load(shared=True)
    worker.project.edit("defs.py", "self.start + n", "self.start - n")
    report, edited = worker.load(shared=True)
    assert report.outdated == ""
    assert call(1) == [101]
    with pytest.raises(AssertionError, match="calls of other code may have changed"):
        edited(1)


def test_code_that_cannot_be_imported_twice_is_not_shared(worker, monkeypatch):
    _, call = worker.load()
    once = "import parts.later\nimport sys\nassert not hasattr(sys, 'imported'), 'once'\n"
    worker.project.write(once=once)
    worker.project.edit("defs.py", "LOADS = []", "LOADS = []\nimport once")
    bundle, _, _ = worker.packed("Model")
    monkeypatch.setattr(sys, "imported", True, raising=False)
    model = ModelSpec("Model", True, bundle.digest, bundle.payload, shares_state=True)
    report = worker.host.load(model, bundle.archive, 0, {}, WorkerLifecycle(), {})
    assert "cannot take over this run's code (AssertionError: once)" in report.outdated
    assert call(1) == [101]
    assert "once" not in sys.modules


def test_only_so_many_versions_are_kept(worker):
    _, call = worker.load()
    calls = []
    for number in range(MAX_VERSIONS):
        worker.project.edit("parts/later.py", f"VALUE = {100 + number}", f"VALUE = {101 + number}")
        calls.append(worker.load()[1])
    assert call(0) == [100], "what has constructed the state is kept"
    assert [each(0) for each in calls[1:]] == [[102 + n] for n in range(MAX_VERSIONS - 1)]
    with pytest.raises(AssertionError, match="no longer has this run's code"):
        calls[0](0)
    assert calls[1](0) == [102]


def test_the_model_of_each_version_is_asked_how_it_is(worker):
    probe = "    def check_health(self):\n        if self.start == 0:\n            {}\n\n"
    place = "    def __call__("
    worker.project.edit("defs.py", place, probe.format("pass") + place)
    assert worker.load()[0].unhealthy_reason == ""
    worker.project.edit("defs.py", "            pass", "            raise OSError('gone')")
    assert "OSError: gone" in worker.load()[0].unhealthy_reason


ASYNC = """
import asyncio

class Model:
    def __init__(self):
        self.gate = None

    async def __call__(self, batch):
        from ours.near import ADDED
        import meeting

        meeting.arrive(ADDED)
        await meeting.leave(ADDED)
        from ours import near

        assert near.ADDED == ADDED
        return {"id": batch["id"], "out": [ADDED]}
"""


def test_calls_in_flight_of_two_versions_do_not_meet(worker, monkeypatch):
    import asyncio
    import types

    meeting: Any = types.ModuleType("meeting")
    arrived: list[int] = []
    gates = {0: threading.Event(), 5: threading.Event()}
    both = threading.Event()

    def arrive(version: int) -> None:
        arrived.append(version)
        if arrived == [0, 0]:
            both.set()

    async def leave(version: int) -> None:
        await asyncio.get_running_loop().run_in_executor(None, gates[version].wait)

    meeting.arrive, meeting.leave = arrive, leave
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    worker.project.write(defs=ASYNC)
    _, call = worker.load(shared=True)
    worker.project.edit("ours/near.py", "0", "5")
    _, edited = worker.load(shared=True)

    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda call=call: results.append(call(1)), daemon=True)
        for call in (call, call, edited)
    ]
    for thread in threads[:2]:
        thread.start()
    assert both.wait(20), "two calls of one version are at work together"
    threads[2].start()
    gates[5].set()
    assert arrived == [0, 0], "another version waits for them"
    gates[0].set()
    for thread in threads:
        thread.join(20)
    assert results[-1] == [5]
    assert arrived == [0, 0, 5]
    assert sorted(results) == [[0], [0], [5]]


def test_turns_go_in_order_and_none_is_passed():
    turns, order, entered, go = VersionLock(), [], threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn("a", lambda: order.append("to a")):
            entered.set()
            assert go.wait(20)

    def one(content: str, started: threading.Event) -> None:
        started.set()
        with turns.turn(content, lambda: order.append(f"to {content}")):
            order.append(content)

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert entered.wait(20)
    for count, content in enumerate("bab", 1):
        started = threading.Event()
        threads.append(threading.Thread(target=one, args=(content, started)))
        threads[-1].start()
        while len(turns._waiting) < count:
            assert started.wait(20)
    go.set()
    for thread in threads:
        thread.join(20)
    assert order == ["to a", "to b", "b", "to a", "a", "to b", "b"]


def test_async_and_synchronous_calls_take_turns():
    turns, inside = VersionLock(), collections.Counter[bool]()
    together: list[collections.Counter[bool]] = []
    start = threading.Barrier(8)

    def call(is_async: bool) -> None:
        start.wait(20)
        for _ in range(20):
            with turns.turn("a", lambda: None, is_async):
                inside[is_async] += 1
                time.sleep(0.0005)
                together.append(inside.copy())
                inside[is_async] -= 1

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(call, number % 2 == 0) for number in range(8)]:
            done.result(60)
    assert not any(counts[True] and counts[False] for counts in together)


def test_async_calls_overlap():
    turns, both_inside = VersionLock(), threading.Barrier(2)

    def call() -> None:
        with turns.turn("a", lambda: None, True):
            both_inside.wait(20)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(call) for _ in range(2)]:
            done.result(60)


def test_a_switch_that_fails_leaves_the_next_to_switch_back():
    turns, order = VersionLock(), []
    with turns.turn("a", lambda: order.append("to a")):
        pass

    def refuse() -> None:
        raise OSError

    with pytest.raises(OSError), turns.turn("b", refuse):  # noqa: PT011  # which is raised above
        pass
    with turns.turn("a", lambda: order.append("to a")):
        pass
    assert order == ["to a", "to a"]


def test_modules_that_are_put_aside_come_back_as_they_were(tmp_path, worker):
    root = private_folder(tmp_path / "both")
    folders = []
    for value in (1, 2):
        worker.project.edit("parts/later.py", "VALUE = ", f"VALUE = {value}")
        packed = worker.packed("Model")[0]
        folders.append(unpack(packed.archive, packed.digest, root))
    found = []
    for folder in folders:
        activate(folder)
        import parts.later  # type: ignore[import-not-found]  # made by the test

        found.append(sys.modules["parts.later"])
    for _ in range(2):
        for folder, module in zip(folders, found, strict=True):
            activate(folder)
            assert sys.modules["parts.later"] is module
            assert parts.later is module, "in a namespace package that both share"
    discard(folders[0])
    activate(folders[0])
    assert "parts.later" not in sys.modules


# State


class Plain:
    def __init__(self) -> None:
        self.number, self.words, self.table = 1, ["a", ("b", 2.5)], {"a": {1, 2}, "b": [[3]]}
        self.other = object()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "new", 1),
        lambda m: delattr(m, "number"),
        lambda m: setattr(m, "number", 2),
        lambda m: setattr(m, "number", True),
        lambda m: setattr(m, "other", object()),
        lambda m: m.words.append("c"),
        lambda m: m.words.__setitem__(0, "A"),
        lambda m: m.table["b"][0].append(4),
        lambda m: m.table["a"].add(3),
        lambda m: m.table.setdefault("c", 1),
        lambda m: setattr(m, "words", list(m.words)),
    ],
)
def test_a_change_of_plain_state_shows(change):
    model = Plain()
    before = state_fingerprint(model)
    assert state_fingerprint(model) == before
    change(model)
    assert state_fingerprint(model) != before


class Part:
    def __init__(self, value: object) -> None:
        self.value = value


def made_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        iter([1]), itertools.count(), made_generator(), io.StringIO("a"), random.Random(0),
        codecs.getincrementaldecoder("utf-8")(),
        numpy.random.default_rng(0), numpy.random.RandomState(0), queue.Queue(),
        iter([1]).__next__, functools.partial(next, iter([1])),
        collections.defaultdict(itertools.count().__next__), Part([iter([1])]),
    ],
)  # fmt: skip
def test_state_that_is_changed_by_reading_is_like_no_other(value):
    model = Plain()
    model.other = [value]
    assert state_fingerprint(model, {__name__}) != state_fingerprint(model, {__name__})


@pytest.mark.parametrize("value", [numpy.zeros(3), Part({"a": 1}), bytearray(b"a")])
def test_a_change_inside_of_an_object_shows(value):
    model = Plain()
    model.other = value
    before = state_fingerprint(model, {__name__})
    assert state_fingerprint(model, {__name__}) == before
    if isinstance(value, Part):
        value.value["a"] = 2
    else:
        value[0] = 2
    assert state_fingerprint(model, {__name__}) != before


def test_a_change_of_a_tensor_shows():
    torch = pytest.importorskip("torch")
    model = Plain()
    model.other = torch.zeros(3)
    before = state_fingerprint(model)
    assert state_fingerprint(model) == before
    model.other.view(-1)[0] += 1
    assert state_fingerprint(model) != before


def test_a_view_shares_the_state_of_an_instance():
    class Edited(Plain):
        def __call__(self) -> int:
            return int(self.number)

    model = Plain()
    shared = view(Edited, model)
    model.number = 7
    assert shared() == 7
    assert shared.__dict__ is model.__dict__


def test_the_content_of_a_model_names_all_that_travels():
    model = ModelSpec("m", True, "code", b"payload", shares_state=True)
    others = [
        replace(model, code="other"), replace(model, payload=b"other"),
    ]  # fmt: skip
    assert len({each.content for each in (model, *others)}) == 3
    assert model.version == model.content
    assert replace(model, shares_state=False).version == ""
    assert replace(model, exact=True, label="x").content == model.content
