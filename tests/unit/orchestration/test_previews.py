"""Previews of chosen rows, with failed rows in place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.prompts import Reversed
from vane_dagster.errors import DefinitionError, SchemaError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.preview import FailedRow
from vane_dagster.providers.base import Answer, Request

CALLS = "calls.txt"


class Halved:
    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def __call__(self, batch: Any) -> Any:
        if self.folder:
            with open(Path(self.folder) / CALLS, "a") as file:
                file.write("".join(f"{id}\n" for id in batch["id"].to_pylist()))
        values = batch["n"].to_pylist()
        if 13 in values:
            raise ValueError("13 cannot be halved")
        return {"half": [n / 2 for n in values]}


def docs(tmp_path: Path, model_above: bool = False, **options: Any) -> vd.Pipeline:
    if not (tmp_path / "src").exists():
        ids = [f"it's {n:03}" for n in range(200)]
        write_source(tmp_path / "src", {"id": ids, "n": range(200)})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=100)
    clean = made.project("clean", {"n": "n", "odd": "n % 2 = 1"})
    if model_above:
        clean = clean.map_batches("same", same, columns=["n"], schema={"n": "BIGINT"})
    clean.map_batches("half", Halved, schema={"half": "DOUBLE"}, columns=["id", "n"], **options)
    return made


def same(batch: Any) -> Any:
    return {"n": batch["n"]}


def ids(found: Any) -> list[int]:
    return [int(id[-3:]) for id in found.table["id"].to_pylist()]


def given(tmp_path: Path) -> dict[str, Any]:
    return {"store": str(tmp_path / "store"), "compute": InProcessCompute()}


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_ids_and_conditions_choose_rows_of_the_input(tmp_path):
    half = docs(tmp_path, fn_constructor_kwargs={"folder": str(tmp_path)})["half"]
    assert ids(half.preview(3, where="odd AND n > 100", **given(tmp_path))) == [101, 103, 105]
    assert (tmp_path / CALLS).read_text().splitlines() == [f"it's {n}" for n in (101, 103, 105)]
    chosen = half.preview(ids=["it's 190", "it's 007", "it's 190"], **given(tmp_path))
    assert ids(chosen) == [7, 190]
    assert [cost.stage for cost in chosen.costs] == ["clean", "half"]
    assert (chosen.costs[1].rows, chosen.costs[1].tokens) == (2, None)
    both = half.preview(ids=["it's 007", "it's 008"], where="odd OR n = 8", **given(tmp_path))
    assert ids(both) == [7, 8]
    numbers = vd.Pipeline("numbers", source=vd.table([{"id": 1}, {"id": 20}]), id="id")
    numbers.project("same", ["id"])
    assert numbers["same"].preview(ids=[20], **given(tmp_path)).table.num_rows == 1


@pytest.mark.parametrize(
    ("chosen", "error", "words"),
    [
        (
            {"ids": ["x"]},
            DefinitionError,
            "its input has no row with 'x' in its id column 'id', among",
        ),
        (
            {"ids": ["it's 001"], "where": "n > 1"},
            DefinitionError,
            "no row with \"it's 001\" in its id column 'id' for which where='n > 1' is true",
        ),
        ({"where": "n > 999"}, DefinitionError, "no row for which where='n > 999' is true, among"),
        ({"ids": []}, DefinitionError, "the number of ids is 0"),
        ({"ids": "it's 001"}, DefinitionError, "ids is .*; expected a list"),
        ({"where": "n >"}, VaneError, "where"),
        ({"where": "m > 1"}, SchemaError, "m"),
    ],
)
def test_what_chooses_no_row_is_refused(tmp_path, chosen, error, words):
    with pytest.raises(error, match=words):
        docs(tmp_path)["half"].preview(**chosen, **given(tmp_path))


def test_the_input_of_a_join_is_the_stage_whose_rows_it_keeps(tmp_path):
    made = docs(tmp_path)
    columns = {"clean": ["n"], "half": {"part": "half"}}
    joined = made.join("joined", made["clean"], made["half"], columns=columns)
    assert ids(joined.preview(3, where="n > 150", **given(tmp_path))) == [151, 152, 153]
    found = joined.preview(ids=["it's 199", "it's 017"], **given(tmp_path))
    assert found.table.select(["n", "part"]).to_pylist() == [
        {"n": 17, "part": 8.5}, {"n": 199, "part": 99.5}
    ]  # fmt: skip
    with pytest.raises(DefinitionError, match="no row with 'x' in its id column 'id', among 200"):
        joined.preview(ids=["x"], **given(tmp_path))
    found = joined.preview(20, **given(tmp_path))
    assert ids(found) == [n for n in range(20) if n != 13]
    assert [(each.stage, each.id) for each in found.failed] == [("half", "it's 013")]


@pytest.mark.parametrize("on_error", [None, "quarantine", "null"])
def test_a_failed_row_is_in_its_place_with_its_error(tmp_path, on_error):
    failures = {} if on_error is None else {"on_error": vd.Failures(on_error)}
    half = docs(tmp_path, **failures)["half"]
    found = half.preview(rows=3, where="n >= 12", **given(tmp_path))
    if on_error == "null":  # the row is there, with its error
        assert found.table["half"].to_pylist() == [6.0, None, 7.0]
        assert (found.failed, [*found.places()]) == ([], [0, 1, 2])
        return
    assert ids(found) == [12, 14]
    (place,) = [each for each in found.places() if isinstance(each, FailedRow)]
    assert [*found.places()] == [0, place, 1]
    assert place == FailedRow("it's 013", "half", "ValueError: 13 cannot be halved")
    assert "ValueError" in str(half.preview(ids=["it's 013"], **given(tmp_path)))


def test_stored_rows_upstream_are_read_and_nothing_is_kept(tmp_path):
    made = docs(tmp_path, model_above=True)
    with pytest.raises(DefinitionError, match="not stored are computed for some rows only"):
        made["half"].preview(1, where="n = 190", **given(tmp_path))
    assert files(tmp_path) == []
    made.run(select=["clean", "same"], **given(tmp_path))
    before = files(tmp_path)
    found = made["half"].preview(1, where="n = 190", **given(tmp_path))
    assert (ids(found), [cost.stage for cost in found.costs]) == ([190], ["half"])
    assert files(tmp_path) == before


def test_tokens_and_prices_are_those_of_the_rows(tmp_path):
    write_source(tmp_path / "src", {"id": range(3), "text": ["one", "three", "fifteen"]})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    model = vd.Model("m", prices={"prompt": 1e6, "completion": 2e6})
    made.prompt("asked", "{text}", provider=Reversed, model=model)
    (cost,) = made["asked"].preview(2, **given(tmp_path)).costs
    assert (cost.rows, cost.tokens, cost.cost) == (2, 16, 24.0)
    assert cost.load_seconds > 0


class Counting(Reversed):
    async def submit(self, request: Request) -> Answer:
        with Path(os.environ[CALLS]).open("a") as file:
            file.write(f"{request.messages[-1]['content']}\n")
        return replace(await super().submit(request), text="x")


@pytest.mark.parametrize("chosen", [{}, {"where": "n > 20"}, {"ids": [8, 64]}])
def test_a_preview_that_needs_more_rows_asks_and_counts_none_twice(tmp_path, monkeypatch, chosen):
    monkeypatch.setenv(CALLS, str(tmp_path / CALLS))
    write_source(tmp_path / "src", {"id": range(100), "n": range(100)})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    asks: Any = {"provider": Counting, "model": "m"}
    first = made.prompt("first", "first {n}", include_columns=["n"], **asks)
    few = first.project("few", ["n"], where="n % 8 = 0")
    second = few.prompt("second", "second {n}", **asks)
    found = second.preview(
        **(chosen if "ids" in chosen else {"rows": 2, **chosen}), **given(tmp_path)
    )
    assert len(found) == 2
    asked = (tmp_path / CALLS).read_text().splitlines()
    assert len(asked) == len(set(asked)) > 10
    assert [cost.stage for cost in found.costs] == ["first", "few", "second"]
    assert sum(cost.rows for cost in found.costs if cost.tokens) == len(asked)
    assert sum(cost.tokens or 0 for cost in found.costs) == 2 * sum(map(len, asked))


def thirds(n: int) -> Any:
    return [{"part": 3 * n + each} for each in range(3)]


def refused(part: int) -> int:
    raise ValueError(f"{part} is refused")


def test_rows_made_from_one_may_all_fail(tmp_path):
    write_source(tmp_path / "src", {"id": range(4), "n": range(4)})
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    parts = made.flat_map("parts", thirds, id="part_id", schema={"part": "BIGINT"})
    last = parts.map("last", refused, output_column="y")
    found = last.preview(4, **given(tmp_path))
    assert (len(found), {each.stage for each in found.failed}) == (0, {"last"})


def brightness(image: Any) -> float:
    return float(image.mean())


def doubled(level: float) -> float:
    return 2 * level


def test_ids_that_are_paths_read_these_files_alone_and_failed_rows_are_shown(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for n in range(40):
        Image.new("RGB", (4, 4), (n, n, n)).save(folder / f"{n:02}.png")
    for n in (1, 30):
        (folder / f"{n:02}.png").write_bytes(b"broken")
    photos = vd.Pipeline("photos", source=vd.images(str(folder), size=(4, 4)), fragment_rows=16)
    level = photos.map("level", brightness, output_column="level")
    double = level.map("double", doubled, output_column="double")
    wanted = [str(folder / f"{n:02}.png") for n in (1, 39)]
    for stage, column, expected in ((level, "level", 39.0), (double, "double", 78.0)):
        found = stage.preview(ids=wanted, **given(tmp_path))
        assert found.table[column].to_pylist() == [expected]
        assert [each.id for each in found.failed] == wanted[:1]
        assert sum(each.rows for each in found.costs) <= 6
    alone = level.preview(ids=wanted[:1], **given(tmp_path))
    assert (len(alone), [each.stage for each in alone.failed]) == (0, ["source"])
    assert "input of" not in "".join(capsys.readouterr())
    with pytest.raises(DefinitionError, match=r"its input has no row with '.*x\.png' in its id"):
        level.preview(ids=[*wanted, str(folder / "x.png")], **given(tmp_path))
    photos.run(select=["level"], **given(tmp_path))  # rows of stored parts are found too
    found = double.preview(ids=wanted[1:], **given(tmp_path))
    assert (found.table["double"].to_pylist(), found.failed) == ([78.0], [])
    assert [cost.stage for cost in found.costs] == ["double"]


def test_an_instance_that_is_used_again_is_reported_once(tmp_path, monkeypatch, capsys):
    def kept(plan: Any, running: Any, show: Any) -> Any:
        show(Noticed("same is not loaded again", is_problem=False))
        return plan

    monkeypatch.setattr("vane_dagster.orchestration.preview.with_kept_instances", kept)
    inferring = docs(tmp_path)["clean"].map_batches("same", same, columns=["n"], schema="infer")
    inferring.preview(3, **given(tmp_path))
    assert capsys.readouterr().out.count("is not loaded again") == 1
