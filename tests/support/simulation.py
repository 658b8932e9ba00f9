"""Runs in a simulated world: storage and workers that fail as they are told, and a plain loop.

The planner, scheduler, committer, hosts and the reuse of rows are real. The file system is in
memory and loses requests and answers; workers are lost with or without their results; calls are
answered in any order; and a run can be killed at each operation. What a run leaves is compared
with what a plain loop makes of the rows.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

import dagster as dg
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

import vane_dagster as vd
from support.arguments import grouped
from support.in_process import InProcess, executed
from support.simulated_stages import is_kept, labelled, pieces, world
from vane_dagster.compute.api import CallResult, Worker
from vane_dagster.errors import StoreError
from vane_dagster.events import Event, Failed
from vane_dagster.planning.definition import components, definition_digest
from vane_dagster.retries import Cause
from vane_dagster.storage.adoptions import (
    Adoption,
    Adoptions,
    adoptions,
    joined,
    keep_adoption,
    undo_adoptions,
)
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.promotion import Promotion
from vane_dagster.storage.store import Store, open_branch
from vane_dagster.worker.protocol import Arrange, ReuseAndCall, Work

PARTITIONS = ("p0", "p1", "p2")
MOST_IDLE_WAITS = 20_000
"""Waits without a call in flight after which a run waits for ever. Each is a millisecond."""


class KilledError(BaseException):
    """The driver is gone: nothing catches it."""


class Storage(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that loses requests or answers, and that ends with its driver.

    Class attributes, because fsspec keeps one instance for each process:
        fails: The operations that fail, by number: "request" before it, "answer" after it.
        kill_at: The operation at which the driver is killed, and where.
    """

    protocol = ("simulated", "memory")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    lock = threading.Lock()
    count = 0
    is_dead = False
    is_calm = True
    fails: ClassVar[Mapping[int, str]] = {}
    kill_at: tuple[int, str] | None = None

    @classmethod
    def begin(cls, fails: Mapping[int, str], kill_at: tuple[int, str] | None) -> None:
        cls.count, cls.is_dead, cls.is_calm = 0, False, False
        cls.fails, cls.kill_at = fails, kill_at

    @classmethod
    def end(cls) -> None:
        cls.is_calm, cls.is_dead = True, False

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return MemoryFileSystem._strip_protocol(path.replace("simulated://", "memory://"))

    def _do(self, path: str, action: Callable[[], Any]) -> Any:
        cls = Storage
        if cls.is_calm:
            return action()
        with cls.lock:
            if cls.is_dead:
                raise KilledError
            if world().worker_died and "/parts/" in path:
                raise PermissionError("a dead worker writes nothing")
            number, cls.count = cls.count, cls.count + 1
            fault = cls.fails.get(number, "")
            if cls.kill_at and cls.kill_at[0] == number:
                cls.is_dead = True
                if cls.kill_at[1] == "answer":
                    action()
                raise KilledError
            if fault == "request":
                raise ConnectionError("the request was lost")
            result = action()
            if fault == "answer":
                raise ConnectionError("the answer was lost")
            return result

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        return self._do(path, lambda: MemoryFileSystem.pipe_file(self, path, value, mode))

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        return self._do(path, lambda: MemoryFileSystem.cat_file(self, path, *args, **options))

    def rm_file(self, path: str) -> Any:
        return self._do(path, lambda: MemoryFileSystem.rm_file(self, path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        def listed() -> Any:
            found = MemoryFileSystem.ls(self, path, detail=True)
            return [self._tagged(each) for each in found] if detail else [e["name"] for e in found]

        return self._do(path, listed)

    def find(self, path: str, *args: Any, detail: bool = False, **options: Any) -> Any:
        def listed() -> Any:
            found = MemoryFileSystem.find(self, path, *args, detail=True, **options)
            return {n: self._tagged(e) for n, e in found.items()} if detail else sorted(found)

        return self._do(path, listed)

    def info(self, path: str, **options: Any) -> Any:
        return self._tagged(MemoryFileSystem.info(self, path))

    def _tagged(self, info: dict[str, Any]) -> dict[str, Any]:
        """Add what object stores describe a file by: its ETag, and the time of its change."""
        if info["type"] == "directory":
            return info
        data = self.store[info["name"]].getvalue()
        tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return {**info, "ETag": tag, "created": datetime.now(UTC)}


fsspec.register_implementation("simulated", Storage, clobber=True)


class Workers(InProcess):
    """Hosts of this process that are lost as they are told.

    Args:
        order: Chooses which of the calls in flight is answered next, by their number.
        losses: What is lost with which answer, by its number: "worker" before the call did
            anything, "node" the same with the worker's node, "result" with the worker after it did
            everything, "table" without the worker.
        kill_at: The answer at which the driver is killed.
        existing: The parts that exist, as (folder, key). None of them may be written again.
    """

    def __init__(
        self,
        order: Callable[[int], int],
        losses: Mapping[int, str],
        kill_at: int | None,
        existing: set[tuple[str, str]],
    ) -> None:
        super().__init__(order)
        self._losses, self._kill_at, self._existing = losses, kill_at, existing
        self._answers = self._idle = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        """The calls with results that the driver got, by stage and value."""
        self.lost_something = False
        self._last_parts: dict[Worker, tuple[str, str]] = {}
        self._made: dict[str, set[str]] = defaultdict(set)  # by fragment of a stage
        self._written: dict[str, set[str]] = defaultdict(set)  # by stage and partition
        self._found: dict[str, frozenset[str]] = {}  # by fragment of a stage
        self.repeated: set[tuple[str, str]] = set()
        """Values whose results were written before their fragment was looked up, by stage."""

    def run(self, worker: Worker, work: Work, tables: Sequence[pa.Table]) -> int:
        place = work.location.partition(", fragment ")[0]
        if isinstance(work.op, (Arrange, ReuseAndCall)):
            self._found[work.location] = frozenset(self._written[place])
            self._made[work.location] = set()

        def answer(ticket: int) -> CallResult:
            if worker not in self._hosts:
                return CallResult(ticket, None, lost="replaced")
            loss, shared = self._losses.get(self._answers, ""), world()
            if loss in ("worker", "node"):
                return self._lost(ticket, worker, "outside" if loss == "node" else "unclear")
            shared.calls.clear()
            table, report = self._hosts[worker].run(work, *tables)
            if shared.worker_died or loss == "result":
                shared.worker_died = False
                return self._lost(ticket, worker)
            if loss == "table" and not report.part:
                self.lost_something = True
                return CallResult(ticket, None, lost="its table", cause="table")
            self.calls.update(shared.calls)
            made = {value for _, value in shared.calls}
            found = self._found.get(work.location, frozenset())
            self.repeated |= {(work.stage.partition("/")[2], value) for value in made & found}
            self._made[work.location] |= made
            if report.part is not None:
                self._written[place] |= self._made[work.location]
            if report.part is not None:
                part = (_below_root(work.target.folder), report.part.key)
                assert part not in self._existing, f"{work.stage} was computed again: {part}"
                if not self.lost_something:  # else its fragment may have started over meanwhile
                    self._existing.add(part)
                    self._last_parts[worker] = part
            return CallResult(ticket, report, table)

        return self._call(answer)

    def _lost(self, ticket: int, worker: Worker, cause: Cause = "unclear") -> CallResult:
        self.lost_something = True
        self._hosts.pop(worker, None)
        return CallResult(ticket, None, lost="it is gone", cause=cause)

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        self.lost_something = True
        self._existing.discard(self._last_parts.pop(worker, ("", "")))  # it may be computed again
        self._hosts.pop(worker, None)
        return Worker(f"{worker.name}'", worker.pool)

    def wait(self, timeout: float) -> list[CallResult]:
        if Storage.is_dead or self._answers == self._kill_at:
            Storage.is_dead = True
            raise KilledError
        if self._calls:
            self._answers, self._idle = self._answers + 1, 0
            return super().wait(timeout)
        self._idle += 1
        threading.Event().wait(0.001)  # another thread may be at work
        assert self._idle < MOST_IDLE_WAITS, "nothing is in flight, and the run waits"
        return []


@dataclass(frozen=True)
class Disturbance:
    """What happens to a run; see `Storage` and `Workers`.

    Attributes:
        order: Numbers that choose the next answer, in turn.
        losses: Losses of workers.
        fails: Failures of the storage.
        kill_answer: The answer at which the driver is killed.
        kill_operation: The operation of the storage at which it is killed.
    """

    order: tuple[int, ...] = (0,)
    losses: Mapping[int, str] = field(default_factory=dict)
    fails: Mapping[int, str] = field(default_factory=dict)
    kill_answer: int | None = None
    kill_operation: tuple[int, str] | None = None


@dataclass
class Node:
    """A stage of the simulated pipeline."""

    kind: str
    name: str
    upstream: tuple[Node, ...]
    options: dict[str, Any]
    suffix: str = "."

    @property
    def calls_code(self) -> bool:
        return self.kind in ("map", "flat_map", "filter")

    @property
    def column(self) -> str:
        """The column that stages downstream read."""
        return self.read if self.kind in ("filter", "write") else self.name

    @property
    def read(self) -> str:
        """The column that it reads."""
        return self.upstream[0].column if self.upstream else "text"

    @property
    def keys(self) -> tuple[str, ...]:
        above = self.upstream[0].keys if self.upstream else ("id",)
        return (f"{self.name}_id", *above) if self.kind == "flat_map" else above


Place = tuple[str, str]
"""A stage and a partition."""
Kill = tuple[int, str]
"""The number of an operation of the storage, and whether before it or after."""
Rows = dict[tuple[str, ...], dict[str, str]]
"""Rows by their keys, in order."""


class PoisonError(Exception):
    """A row fails a partition."""


def plain_loop(
    nodes: Sequence[Node], source: Rows, may_fail: bool = True
) -> dict[str, tuple[Rows, int] | None]:
    """Compute the rows of each stage and the number of failed rows; None of one that fails."""
    done: dict[str, tuple[Rows, int] | None] = {}
    for node in nodes:
        above = [done[each.name] for each in node.upstream]
        if any(each is None for each in above):
            done[node.name] = None
            continue
        inputs = [each[0] for each in above if each] or [source]
        try:
            done[node.name] = _computed(node, inputs, may_fail)
        except PoisonError:
            done[node.name] = None
    return done


def _computed(node: Node, inputs: Sequence[Rows], may_fail: bool) -> tuple[Rows, int]:
    read = node.read
    made: Rows = {}
    failed = 0
    for keys, row in inputs[0].items():
        value = row[read]
        if node.calls_code and is_failure(node, value):
            failed += 1
        elif node.kind == "project" or node.kind == "map":
            made[keys] = {node.name: value + node.suffix}
        elif node.kind == "flat_map":
            for number, piece in enumerate(filter(None, value.split("+"))):
                made[(f"{keys[0]}-{number}", *keys)] = {node.name: piece + node.suffix}
        elif node.kind == "filter":
            if (len(value) + len(node.suffix)) % 3 > 0:
                made[keys] = row
        elif node.kind == "join":
            if keys in inputs[1]:
                other = inputs[1][keys][node.upstream[1].column]
                made[keys] = {node.upstream[0].column: value, node.name: other}
        else:
            made[keys] = row
    if failed and may_fail and node.options.get("on_error") == "raise":
        raise PoisonError
    return made, failed


class World:
    """A source, a pipeline and a store, with what earlier runs have left."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        Storage.store.clear()
        Storage.pseudo_dirs[:] = [""]
        Storage.end()
        self.nodes = list(nodes)
        self.store = Store(StoragePath("simulated://store"))
        self.above: World | None = None
        """Of a branch, the world that it was opened in."""
        self.branches: list[World] = []
        self.fragment_rows = 3
        self._pipelines: dict[Any, vd.Pipeline] = {}
        self._adopted: dict[str, tuple[str, tuple[str, str]]] = {}
        """The stage and suffixes of all adoptions, by the name of their record."""
        self._since: dict[Place, set[str]] = {}
        """The suffixes of all runs since a stage was forced in a partition."""
        self.stored: dict[Place, set[Any]] = defaultdict(set)
        """The rows whose results are in the manifest in force.

        A row is its value, with its id if it has a result of its own. Without those of partitions
        that have a part from before a forced run, which are not copied any more.
        """
        self._outdated: set[tuple[str, str]] = set()
        self._was_forced = False
        self._started: dict[Place, Any] = {}
        """What was in force above when a branch first committed a place, or was promoted since."""
        self.failed: set[Place] = set()
        """The stages that failed in the latest run, by partition."""
        self._ids = itertools.count(1)
        self.files = {partition: {"a": self.new_rows(["a+b", "c"])} for partition in PARTITIONS}

    def branch(self) -> World:
        """Open a branch with the same source, and discard an earlier one."""
        fs = Storage()
        if fs.exists("/branch"):
            fs.rm("/branch", recursive=True)
        made = copy.copy(self)
        made.nodes, made._since = copy.deepcopy(self.nodes), copy.deepcopy(self._since)
        made.store = open_branch("simulated://branch", self.store.root.url, {})
        made.above, made.branches, made._was_forced = self, [], False
        made.stored, made._started = defaultdict(set), {}
        made._outdated, made.failed = set(self._outdated), set()
        self.branches = [made]
        return made

    def content(self) -> dict[str, bytes]:
        """Return all files except those of the source and of a branch."""
        other = ("/branch/", "/src/")
        return {p: f.getvalue() for p, f in [*Storage.store.items()] if not p.startswith(other)}

    def new_rows(self, values: Sequence[str]) -> list[tuple[str, str]]:
        ids = [next(self._ids) for _ in values]
        return [(f"{id}", value) for id, value in zip(ids[::-1], values)]

    def rows(self, partition: str) -> Rows:
        files = self.files[partition]
        return {(id,): {"text": text} for name in sorted(files) for id, text in files[name]}

    def plain_loop(self, partition: str, **options: Any) -> dict[str, tuple[Rows, int] | None]:
        """Compute a partition as a plain loop does."""
        return plain_loop(self.nodes, self.rows(partition), **options)

    def _killed(self, kill: Kill | None, act: Callable[[], object]) -> bool:
        """Do something that is killed at an operation of the storage; return whether it was."""
        Storage.begin({}, kill)
        try:
            act()
        except KilledError:
            return True
        finally:
            Storage.end()
        return False

    def _records(self) -> set[str]:
        return {name for each in self.store.layers for name in each.root.child("docs").names()}

    def write(self) -> None:
        """Write the files of the source, those that have changed."""
        fs = Storage()
        kept = set()
        for partition, files in self.files.items():
            for name, rows in files.items():
                sink = pa.BufferOutputStream()
                columns = {"id": [id for id, _ in rows], "text": [text for _, text in rows]}
                schema = pa.schema([("id", pa.string()), ("text", pa.string())])
                pq.write_table(pa.table(columns, schema), sink)
                path, data = f"/src/{partition}/{name}.parquet", sink.getvalue().to_pybytes()
                kept.add(path)
                if not fs.exists(path) or fs.cat_file(path) != data:
                    fs.pipe_file(path, data)
        for path in set(fs.find("/src")) - kept:
            fs.rm_file(path)

    def pipeline(self) -> vd.Pipeline:
        edit = (self.fragment_rows, *(node.suffix for node in self.nodes))
        if edit not in self._pipelines:
            self._pipelines[edit] = self._declare()
        return self._pipelines[edit]

    def _declare(self) -> vd.Pipeline:
        docs = vd.Pipeline(
            "docs",
            source=vd.parquet("simulated://src/{partition_key}/*.parquet"),
            id="id",
            fragment_rows=self.fragment_rows,
            partitions_def=dg.StaticPartitionsDefinition(list(PARTITIONS)),
        )
        stages: dict[str, Any] = {}
        for node in self.nodes:
            above = stages[node.upstream[0].name] if node.upstream else docs
            read = node.read
            if node.kind == "project":
                keys = {key: key for key in node.keys}
                columns = {**keys, node.name: f"{read} || '{node.suffix}'"}
                stages[node.name] = above.project(node.name, columns)
            elif node.kind == "join":
                other = node.upstream[1]
                columns = {node.upstream[0].name: [read], other.name: {node.name: other.column}}
                both = (above, stages[other.name])
                stages[node.name] = docs.join(node.name, *both, columns=columns)
            elif node.kind == "write":
                url = f"simulated://out/{node.name}/{{partition_key}}/"
                stages[node.name] = above.write(node.name, url)
            else:
                function: Any = {"map": labelled, "flat_map": pieces, "filter": is_kept}[node.kind]
                own = {"id": f"{node.name}_id"} if node.kind == "flat_map" else {}
                given = {"version": "1", "max_retries": 0, **own, **node.options}
                stages[node.name] = getattr(above, node.kind)(
                    node.name, function, columns={"value": read},
                    fn_kwargs={"stage": node.name, "suffix": node.suffix}, **grouped(given),
                )  # fmt: skip
        return docs

    def run(
        self,
        partitions: Sequence[str] = PARTITIONS,
        disturbance: Disturbance | None = None,
        **options: Any,
    ) -> set[tuple[str, str]]:
        """Run the pipeline, and compare what it leaves with a plain loop."""
        self.write()
        given = disturbance or Disturbance()
        numbers = iter(given.order * 10_000)
        everywhere = {each: each.parts() for each in (self, *self.branches)}
        existing, is_forced = everywhere[self], bool(options.get("force"))
        workers = Workers(
            lambda count: next(numbers),
            given.losses,
            given.kill_answer,
            set() if is_forced else existing,  # those of another forced run, too
        )
        before = {each: self.in_force(*each) for each in self.places(partitions)}
        above, own = self._look_above(), self._own()
        Storage.begin(given.fails, given.kill_operation)
        events: list[Event] = []
        try:
            planned = (self.pipeline(), self.store, list(partitions), workers, PARTITIONS)
            events = executed(*planned, **options)
        except BaseException:
            if not Storage.is_dead:
                raise
        finally:
            was_killed = Storage.is_dead
            Storage.end()
        for each, node in itertools.product(everywhere, self.nodes):
            for partition in PARTITIONS:
                each._since.get((node.name, partition), set()).add(node.suffix)
        for place in filter(self.is_own, self.places(PARTITIONS)):
            self._started.setdefault(place, above.get(place))
            was, promoted = own[place], self.above and self.above.latest(place)
            if was not in (None, self._own()[place]) and promoted == (place[0], *was.version):
                self._started[place] = promoted
        if was_killed:
            for node in filter(lambda each: each.calls_code, self.nodes):
                for partition in partitions:  # what it has committed replaces what was in force
                    if self.in_force(node.name, partition) != before[node.name, partition]:
                        self._keep(node, partition, self._wanted(node, partition))
            return set()
        failed = {(e.stage, e.partition): e.error for e in events if isinstance(e, Failed)}
        self.failed = set(failed)
        if is_forced:
            self._was_forced = True
            for each, parts in everywhere.items():
                each._outdated |= parts
            done = [place for place in self.places(partitions) if place not in failed]
            suffixes = {node.name: node.suffix for node in self.nodes}
            self._since |= {(name, key): {suffixes[name]} for name, key in done}
        self._compare(partitions, before, failed)
        self._count(partitions, workers, options, bool(given.fails))
        steady: set[str] = set()
        for node in self.nodes:
            fails = node.options.get("on_error") == "raise"
            if not fails and all(each.name in steady for each in node.upstream):
                steady.add(node.name)
        return {call for call in workers.calls if call[0] in steady}

    def adopt(self, node: Node, suffix: str, kill: Kill | None = None) -> None:
        """Declare that a stage's definition makes the same rows as that with another suffix."""
        sides = []
        present = node.suffix
        for node.suffix in (suffix, present):
            pipeline = self.pipeline()
            sides.append(components(pipeline, pipeline[node.name].spec))
        digests = [definition_digest(side) for side in sides]
        what = (*digests[::-1], *sides[::-1], ["argument"], 1, False, 1, 0.0, 0, "me")
        adoption = Adoption(node.name, *what, at=time.time_ns())
        self._killed(kill, lambda: keep_adoption(self.store, "docs", adoption))
        self._adopted[adoption.name] = (node.name, (present, suffix))

    @property
    def was_adopted(self) -> bool:
        """Whether any definition was ever adopted."""
        return any(f"adopted{name}" in self._records() for name in self._adopted)

    def adopted(self) -> set[str]:
        records = self._records()
        known = (name for name in self._adopted if f"adopted{name}" in records)
        return {name for name in known if f"undone{name}" not in records}

    def equal_to(self, node: Node) -> list[str]:
        """Return the suffixes that count as that of a stage, itself first."""
        known = [self._adopted[name] for name in self.adopted()]
        return joined(node.suffix, [pair for stage, pair in known if stage == node.name])

    def undo(self, node: Node, kill: Kill | None = None) -> None:
        """Split all that counts as a stage's definition, again if it is killed."""
        pipeline = self.pipeline()
        definition = definition_digest(components(pipeline, pipeline[node.name].spec))
        equal = self.equal_to(node)
        of_stage = [each for each in self._adopted.items() if each[1][0] == node.name]
        undone = {name for name, (_, pair) in of_stage if pair[0] in equal}
        left = self.adopted() - undone

        def split() -> None:
            known = adoptions(self.store, "docs").get(node.name, Adoptions()).of(definition)
            undo_adoptions(self.store, "docs", known, definition)

        if self._killed(kill, split):
            assert self.adopted() >= left
            split()
        live = [a.name for found in adoptions(self.store, "docs").values() for a in found.live]
        assert {*live} == self.adopted() == left

    def promote(self, kills: Sequence[Kill | None], is_up_to_date: bool, deploys: bool) -> str:
        """Promote a branch, and compare what is then in force above with what is here.

        Args:
            kills: The operation of the storage at which each attempt is killed.
            is_up_to_date: Whether the branch is, so only commits above are a reason to refuse it.
            deploys: Whether the definitions of the branch become those above.

        Returns:
            What became of it: "promoted", "refused" or "killed".
        """
        assert self.above is not None
        main, outcome = self.above, "killed"
        self._look_above()
        places = [(n.name, p) for n in self.nodes if n.kind != "write" for p in PARTITIONS]
        own = [place for place in places if self.is_own(place)]
        files, adopted = main.content(), main.adopted() | self.adopted()
        before = {place: main.latest(place) for place in own}
        others = [p for p in own if before[p] not in (self._started[p], self.latest(p))]

        def carry_out() -> None:
            list(Promotion(self.store, main.store, "docs").carry_out())

        for kill in kills:
            try:
                if not self._killed(kill, carry_out):
                    outcome = "promoted"
            except StoreError:
                if own and is_up_to_date and not others:
                    raise
                assert main.content() == files, "a promotion that was refused has written"
                return "refused"
            assert main.adopted() <= adopted, "an adoption that was undone is in force"
            for place in others:
                assert main.latest(place) == before[place], f"{place}: of another run"
            for place in places if outcome == "promoted" else ():
                assert main.rows_in_force(place) == self.rows_in_force(place), place
        assert outcome == "killed" or not others
        main._take_over(self, outcome == "promoted", deploys)
        return outcome

    def _take_over(self, branch: World, is_whole: bool, deploys: bool) -> None:
        """Expect what a promotion leaves, or one that was killed."""
        for node, theirs in zip(self.nodes, branch.nodes):
            if is_whole and deploys:
                node.suffix = theirs.suffix
                self.fragment_rows = branch.fragment_rows
            for place in ((node.name, partition) for partition in PARTITIONS):
                if place in self._since and place in branch._since:
                    self._since[place] |= branch._since[place]
                else:
                    self._since.pop(place, None)
                is_known = is_whole and node.suffix == theirs.suffix
                self.stored[place] = set(branch.stored[place]) if is_known else set()
        self._outdated |= branch._outdated

    def _look_above(self) -> dict[Place, Any]:
        """Return what is in force above of what a branch has not committed, and note its rows."""
        if self.above is None:
            return {}
        found, main = {}, self.above
        for node, other in zip(self.nodes, main.nodes):
            for place in ((node.name, partition) for partition in PARTITIONS):
                if not self.is_own(place):
                    found[place] = main.latest(place)
                    is_known = node.suffix == other.suffix and not self._was_forced
                    self.stored[place] = set(main.stored[place]) if is_known else set()
        return found

    def is_own(self, place: Place) -> bool:
        return self.above is not None and self.store.latest_own("docs", *place) is not None

    def _own(self) -> dict[Place, Any]:
        return {p: self.store.latest_own("docs", *p) for p in self.places(PARTITIONS)}

    def latest(self, place: Place) -> Any:
        stage, partition = place
        name = self.store.latest("docs", stage, [partition]).get(partition)
        return name and (stage, *name.version)

    def rows_in_force(self, place: Place) -> Rows | None:
        (node,), manifest = [n for n in self.nodes if n.name == place[0]], self.in_force(*place)
        return None if manifest is None else self._stored(node, place[1], manifest)

    def _content(self, place: Place) -> Any:
        """Return the rows that are in force, or the files of a publication, killed ones too."""
        published = [node for node in self.nodes if (node.name, node.kind) == (place[0], "write")]
        return self._files(*place) if published else self.rows_in_force(place)

    def places(self, partitions: Sequence[str]) -> list[Place]:
        return [(node.name, partition) for node in self.nodes for partition in partitions]

    def in_force(self, stage: str, partition: str) -> Any:
        return self.store.in_force("docs", stage, partition)

    def collect(self, late: float) -> None:
        """Delete what was marked that nothing in force needs, and mark the rest of that."""
        rows = {place: self._content(place) for place in self.places(PARTITIONS)}
        list(collect(self.store, GcPolicy(time.time() + late, 1.0, 1.0)))
        assert rows == {place: self._content(place) for place in self.places(PARTITIONS)}

    def parts(self) -> set[tuple[str, str]]:
        """The parts that no plan may write again, as (folder below the root, key)."""
        found = set()
        for (stage, partition), each in itertools.product(
            self.places(PARTITIONS), self.store.layers
        ):
            folder = each.parts("docs", stage, partition)
            marked = self.store.condemned("docs", stage)
            names = [n for n in folder.names() if n.count(".") == 1]
            names = [name for name in names if f"{partition}/{name}" not in marked]
            found |= {(_below_root(folder), name.rpartition("-")[0]) for name in names}
        return found

    def _compare(
        self, partitions: Sequence[str], before: Mapping[Any, Any], failed: Mapping[Any, Any]
    ) -> None:
        for partition in partitions:
            stored: dict[str, Rows | None] = {}
            for node in self.nodes:
                place, stored[node.name] = (node.name, partition), None
                above = [stored[each.name] for each in node.upstream] or [self.rows(partition)]
                rows = self._possible(node, partition, above)
                manifest = self.in_force(*place)
                if not rows:
                    assert place in failed, f"{place} should have failed"
                    assert manifest == before[place], f"{place} failed and was committed"
                    continue
                assert place not in failed, f"{place} failed: {failed[place]}"
                assert manifest is not None, f"{place} was not committed"
                own = stored[node.name] = self._stored(node, partition, manifest)
                possible = [_by_input(node, each) for each, _ in rows]
                for input, made in _by_input(node, own, possible).items():
                    assert made in [each.get(input, {}) for each in possible], f"{input}: {place}"
                assert sum(part.quarantined for part in manifest.parts) == rows[0][1], place
                if node.kind == "write":
                    assert self._published(node, partition) == rows[0][0], f"published {place}"

    def _possible(
        self, node: Node, partition: str, above: Sequence[Rows | None]
    ) -> list[tuple[Rows, int]]:
        """Return the rows of each definition that counts as a stage's; none if it fails."""
        inputs = [each for each in above if each is not None]
        if len(inputs) < len(above):
            return []
        equal = self.equal_to(node)
        since = self._since.get((node.name, partition), equal)
        try:
            made = [replace(node, suffix=suffix) for suffix in equal if suffix in since]
            return [_computed(each, inputs, True) for each in made]
        except PoisonError:
            return []

    def _stored(self, node: Node, partition: str, manifest: Any) -> Rows:
        if node.kind == "write":
            return self._published(node, partition)
        folder = self.store.parts_of(manifest)
        tables = [read_part(folder, part.name) for part in manifest.parts]
        return _by_keys(node, [row for table in tables for row in table.to_pylist()])

    def _files(self, stage: str, partition: str) -> list[str]:
        root = "/branch/~published/docs" if self.is_own((stage, partition)) else "/out"
        names = Storage().find(f"{root}/{stage}/{partition}")
        return sorted(name for name in names if name.endswith(".parquet"))

    def _published(self, node: Node, partition: str) -> Rows:
        fs = Storage()
        tables = [pq.read_table(fs.open(name)) for name in self._files(node.name, partition)]
        return _by_keys(node, [row for table in tables for row in table.to_pylist()])

    def _wanted(self, node: Node, partition: str) -> list[tuple[str, str]]:
        """The rows that a stage computes, as in `stored`; those of partitions that fail too."""
        rows = self.rows(partition)
        if node.upstream:
            above = self.plain_loop(partition, may_fail=False)[node.upstream[0].name]
            assert above is not None, "nothing fails"
            rows = above[0]
        own = bool(node.options.get("per_row"))
        return [(keys[0] if own else "", row[node.read]) for keys, row in rows.items()]

    def _keep(self, node: Node, partition: str, wanted: Sequence[tuple[str, str]]) -> None:
        """Note the rows of the manifest in force whose results may be copied."""
        parts = self.in_force(node.name, partition).parts
        folder = _below_root(self.store.parts("docs", node.name, partition))
        is_outdated = any((folder, part.key) in self._outdated for part in parts)
        self.stored[node.name, partition] = set() if is_outdated else set(wanted)

    def _count(
        self,
        partitions: Sequence[str],
        workers: Workers,
        options: Mapping[str, Any],
        has_failures: bool,
    ) -> None:
        """Compare the calls with the rows that had no result, unless calls were lost."""
        if options.get("force"):  # rows of other partitions are not copied any more either
            for node, partition in self.places(PARTITIONS):
                if partition not in partitions:
                    self.stored[node, partition].clear()
                for each in self.branches:
                    each.stored[node, partition].clear()
        if self.was_adopted:  # the values that a stage reads may be of either definition
            return
        allowed: Counter[tuple[str, str]] = Counter()
        for partition in partitions:
            ends = self.plain_loop(partition)
            for node in self.nodes:
                if not node.calls_code:
                    continue
                wanted = self._wanted(node, partition)
                stored = self.stored[node.name, partition]
                if options.get("retry_quarantined"):
                    stored = {each for each in stored if not is_failure(node, each[1])}
                allowed.update((node.name, each[1]) for each in wanted if each not in stored)
                if ends[node.name] is not None:
                    self._keep(node, partition, wanted)
                elif options.get("force"):  # its results are never copied again
                    self.stored[node.name, partition] = set()
        # What cannot be looked up, because the storage fails, is computed.
        if workers.lost_something or has_failures or options.get("force"):
            return
        for node in self.nodes:
            if node.calls_code and node.options.get("reuse") == "rows":
                calls = {v: n for (name, v), n in workers.calls.items() if name == node.name}
                for value, count in calls.items():
                    if not is_failure(node, value) and node.options["on_error"] != "raise":
                        assert count <= allowed[node.name, value], (
                            f"{node.name} was called {count} times for {value!r}, expected "
                            f"{allowed[node.name, value]}"
                        )
                        again = (node.name, value) in workers.repeated
                        assert node.options["per_row"] or not again, (
                            f"{node.name} was called for {value!r} again in one run"
                        )


def _below_root(folder: StoragePath) -> str:
    """Return the same folder's place for a branch and for its fallback."""
    return folder.url.partition("/docs/")[2] or folder.url


def is_failure(node: Node, value: str) -> bool:
    """Whether a stage fails for a value."""
    return f"bad {node.name}" in value or f"kill {node.name}" in value


def _by_input(
    node: Node, rows: Rows, others: Sequence[Mapping[Any, Rows]] = ()
) -> dict[tuple[str, ...], Rows]:
    """Group rows by the keys of their input rows, with those that others have."""
    found: dict[tuple[str, ...], Rows] = {keys: {} for each in others for keys in each}
    for keys, row in rows.items():
        found.setdefault(keys[1:] if node.kind == "flat_map" else keys, {})[keys] = row
    return found


def _by_keys(node: Node, rows: Sequence[Mapping[str, Any]]) -> Rows:
    found = {}
    for row in rows:
        keys = tuple(row[key] for key in node.keys)
        assert keys not in found, f"{node.name} has {keys} twice"
        found[keys] = {name: value for name, value in row.items() if name not in node.keys}
    return found
