"""Two versions of a stage are compared: of two runs, or of two stores."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.data import partitioned, write_source
from support.in_process import InProcess, compute
from support.prompts import Person, docs
from vane_dagster.cli.main import main
from vane_dagster.errors import DefinitionError, SchemaError, StoreError, TraceError
from vane_dagster.providers.base import Answer, Request
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

KEYS = ["a", "b"]


def first(batch: Any) -> Any:
    return {"y": [float(x) for x in batch["x"].to_pylist()]}


def second(batch: Any) -> Any:
    return {"y": [float(x) + (x == 3) for x in batch["x"].to_pylist()]}


def pipeline(tmp_path: Path, fn: Any, rows: int = 10, **options: Any) -> vd.Pipeline:
    for day, key in enumerate(KEYS):
        ids = range(10 * day, 10 * day + rows)
        write_source(tmp_path / "src" / key, {"id": ids, "x": ids})
    made = partitioned(tmp_path / "src", KEYS, "numbers")
    made.map_batches("y", fn, schema={"y": "DOUBLE"}, **options)
    return made


def test_a_check_compares_with_a_stage_that_the_same_run_computes(tmp_path: Path) -> None:
    docs = pipeline(tmp_path, first)
    compared = vd.checks.Compared(docs["y"], columns=["y"], max_different=0.05)
    docs.map_batches("z", second, schema={"y": "DOUBLE"}, asset=vd.Asset(checks=[compared]))
    store = Store(StoragePath(str(tmp_path / "store")))

    compute(docs, store, KEYS, InProcess(lambda count: -1))

    found = {key: results(store, "z", key)["compared"] for key in KEYS}
    assert [found[key].passed for key in KEYS] == [False, True]
    assert found["a"].description == (
        "1 of 10 rows differ from numbers/y; 0 exist only there and 0 only here (10.00%); the "
        "limit is 0.05"
    )
    metadata = found["a"].metadata
    assert (metadata["equal"], metadata["different"], metadata["share_different"]) == (9, 1, 0.1)
    assert metadata["y: rows that differ"] == [{"id": "3", "numbers/y": "3.0", "numbers/z": "4.0"}]
    assert metadata["numbers/z, 1 partition"][1] == {
        "measure": "only here", "numbers/y": "0", "numbers/z": "0",
    }  # fmt: skip
    later = vd.checks.Compared("numbers/later")
    with pytest.raises(DefinitionError, match="'later', which is not declared yet"):
        docs.map_batches("w", first, schema={"y": "DOUBLE"}, asset=vd.Asset(checks=[later]))


def test_a_check_compares_a_branch_with_its_fallback_and_with_another_store(tmp_path: Path) -> None:
    def checked(fn: Any, with_: Any = None) -> vd.Pipeline:
        asset = vd.Asset(checks=[vd.checks.Compared(with_, tolerance=0.1)])
        return pipeline(tmp_path, fn, asset=asset)

    place = str(tmp_path / "store")
    production = Store(StoragePath(place))
    branch = Store(StoragePath(str(tmp_path / "branch")), fallback=production)
    compute(checked(first), production, KEYS[:1])
    assert "no other version" in results(production, "y", "a")["compared"].description
    compute(checked(second), branch, KEYS)
    found = {key: results(branch, "y", key)["compared"] for key in KEYS}
    assert found["a"].passed, "without a limit"
    assert found["a"].metadata["different"] == 1
    assert "no other version" in found["b"].description, "the fallback lacks the partition"

    assert vd.diff("numbers/y", place, branch.root.url, partitions=["a"], store=branch).different

    other = Store(StoragePath(str(tmp_path / "other")))
    compute(checked(first, vd.FragmentStore(root=place)), other, KEYS[:1])
    assert results(other, "y", "a")["compared"].metadata["equal"] == 10
    compute(checked(second, "numbres/y"), other, KEYS[:1])
    assert "never materialized" in results(other, "y", "a")["compared"].description


def test_a_branch_without_its_fallback_is_named(tmp_path: Path) -> None:
    place, docs = str(tmp_path / "store"), pipeline(tmp_path, first)
    branch = Store(StoragePath(str(tmp_path / "branch")), fallback=Store(StoragePath(place)))
    compute(docs, branch.layers[-1], KEYS)
    compute(docs, branch, KEYS)  # all is up to date
    text = re.escape(f"'{branch.root.url}' (a branch, opened without its fallback '{place}')")
    with pytest.raises(StoreError, match=f"never materialized into {text}; "):
        vd.diff("numbers/y", place, branch.root.url, store=place)
    with pytest.raises(TraceError, match=f"{text} has no pipeline"):
        vd.trace("numbers/y", 1, partition="a", store=branch.root.url)
    listed = CliRunner().invoke(main, ["store", "ls", branch.root.url])
    assert re.search(f"{text} has no stage", listed.output)
    assert vd.diff("numbers/y", place, branch.root.url, store=branch).is_equal


def results(store: Store, stage: str, key: str) -> dict[str, Any]:
    manifest = store.in_force("numbers", stage, key)
    assert manifest is not None
    return {result.name: result for result in manifest.checks}


def ran(store: str, docs: vd.Pipeline, key: str, run_id: str) -> str:
    compute(docs, Store(StoragePath(store)), [key], run_id=run_id)
    return run_id


def test_runs_and_stores_are_compared(tmp_path: Path) -> None:
    store, other = str(tmp_path / "store"), str(tmp_path / "other" / "store")
    old = [ran(store, pipeline(tmp_path, first), key, f"0000{key}111") for key in KEYS]
    new = ran(store, pipeline(tmp_path, second, rows=9), "a", "11112222-3333")

    found = vd.diff("numbers/y", old[0], new[:8], store=store)

    assert (found.partitions, found.only_before, found.only_now) == (1, 1, 0)
    assert (found.equal, found.different, found.is_equal) == (8, 1, False)
    (y,) = (column for column in found.columns if column.different)
    assert [(e.id, e.before, e.now) for e in y.examples] == [("3", "3.0", "4.0")]

    ran(other, pipeline(tmp_path, second, rows=9), "a", "4444")
    assert vd.diff("numbers/y", other, store=store).is_equal

    arguments = ["numbers/y", "--between", old[0], "latest", "--store", store]
    shown = CliRunner().invoke(main, ["diff", *arguments])
    assert shown.exit_code == 0, shown.output
    assert "y: 1 row differs" in shown.output
    latest = vd.diff("numbers/y", old[0], store=store)
    assert shown.output == f"{latest}\n"
    assert latest._repr_html_() == f"<pre>{latest}</pre>"
    assert vd.diff("numbers/y", old[0][:5], "file://" + other, store=store).now.rows == 9
    as_json = CliRunner().invoke(main, ["diff", *arguments, "--json"])
    assert json.loads(as_json.output)["different"] == 1


def both(batch: Any) -> Any:
    return {"answer": ["a"] * len(batch), "took": time.perf_counter() + batch["x"].to_numpy()}


def test_columns_that_always_differ_are_left_out(tmp_path: Path) -> None:
    roots = str(tmp_path / "one"), str(tmp_path / "two")
    write_source(tmp_path / "src" / "a", {"id": range(10), "x": range(10)})
    docs = partitioned(tmp_path / "src", ["a"], "numbers")
    docs.map_batches("y", both, schema={"answer": "VARCHAR", "took": "DOUBLE"})
    for place, root in enumerate(roots):
        ran(root, docs, "a", f"{place}111")

    given = {"store": roots[0]}
    assert vd.diff("numbers/y", *roots, **given).different == 10
    found = vd.diff("numbers/y", *roots, columns=["answer"], **given)
    assert found.is_equal
    assert [each.column for each in found.columns] == ["answer"]
    arguments = ["diff", "numbers/y", "--between", *roots, "--store", roots[0], "--json"]
    shown = json.loads(CliRunner().invoke(main, [*arguments, "--columns", "took,answer"]).output)
    assert {each["column"] for each in shown["columns"]} == {"took", "answer"}
    with pytest.raises(SchemaError, match=r"has no column 'anwser'; it has .* Did you mean 'ans"):
        vd.diff("numbers/y", *roots, columns=["anwser"], **given)


class Mood:
    """Answers with a mood that depends on the model's name."""

    def __init__(self, model: str) -> None:
        self.model = model

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"]
        mood = "bad" if self.model == "n" and "fox" in text else "good"
        return Answer(json.dumps({"name": text[:1], "age": 7, "mood": mood}), 20, 5)


def test_answers_are_compared_by_field_and_without_their_usage(tmp_path: Path) -> None:
    store = str(tmp_path / "store")

    def asked(run_id: str, model: str, **options: Any) -> str:
        pipeline = docs(tmp_path)
        greedy = {"sampling_params": {"temperature": 0}, "return_format": Person}
        pipeline.prompt("asked", "{text}", model=model, provider=Mood, **greedy, **options)
        compute(pipeline, Store(StoragePath(store)), [None], run_id=run_id)
        return run_id

    runs = asked("111", "m"), asked("222", "m", include_columns=["text"]), asked("333", "n")
    copied = vd.diff("docs/asked", *runs[:2], store=store)
    assert copied.different == 0
    found = vd.diff("docs/asked", runs[0], store=store)
    assert {each.column: each.different for each in found.columns if each.different} == {
        "asked": 2, "asked.mood": 2,
    }  # fmt: skip
    assert "asked: rows that differ" in str(found)
    assert "asked.mood: 2 rows differ\n111   latest  rows\ngood  bad     2" in str(found)
    usage = vd.diff("docs/asked", runs[0], store=store, columns=["asked_usage"])
    assert {"asked_usage", "asked_usage.seconds"} <= {each.column for each in usage.columns}


def test_the_rows_that_a_run_has_committed_are_loaded(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    ran(place, pipeline(tmp_path, first), "a", "111")
    ran(place, pipeline(tmp_path, second), "a", "222")

    def fourth(**given: Any) -> float:
        return vd.load("numbers/y", store=place, **given)["y"].to_pylist()[3]

    assert (fourth(), fourth(run="222"), fourth(run="1", partitions="a")) == (4.0, 4.0, 3.0)
    with pytest.raises(StoreError, match="'numbers/y': run '1' has not committed 'b'"):
        fourth(run="1", partitions=["a", "b"])
    with pytest.raises(StoreError, match=r"no run '3' has committed .* there are: '111', '222'"):
        fourth(run="3")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("diff")
    store, docs = str(folder / "store"), pipeline(folder, first)
    return store, {key: ran(store, docs, key, f"0000{key}111") for key in KEYS}


def test_a_version_that_is_no_text_is_refused() -> None:
    branch = vd.FragmentStore(root="branch")
    with pytest.raises(StoreError, match="a version is a FragmentStore; expected the root of a"):
        vd.diff("numbers/y", branch)  # type: ignore[arg-type]  # the error is tested


@pytest.mark.parametrize(
    ("before", "now", "partitions", "message"),
    [
        ("0123abcd", "latest", None, "no run '0123abcd' has committed rows of 'numbers/y'"),
        ("0000", "latest", None, "several runs begin with '0000'; give more of the id"),
        ("latest", "latest", ["c"], "partition 'c' was never materialized"),
        ("{a}", "{b}", None, "have no partition of 'numbers/y' in common: 'a' and 'b'"),
        ("f" * 100 + "/", "latest", None, "'numbers/y' was never materialized into"),
        ("s3x", "latest", None, "'numbers/y' was never materialized into"),
    ],
)
def test_a_version_that_does_not_exist_is_named(
    stored: tuple[str, dict[str, str]], before: str, now: str, partitions: Any, message: str
) -> None:
    store, runs = stored

    with pytest.raises(StoreError, match=message):
        vd.diff(
            "numbers/y",
            before.format(**runs),
            now.format(**runs),
            partitions=partitions,
            store=store,
        )
