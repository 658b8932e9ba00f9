"""The examples of the pages in docs/concepts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vane_dagster as vd
from support.paths import REPOSITORY
from support.snippets import block, imported

CONCEPTS = REPOSITORY / "docs" / "concepts"
HELPERS = (
    "def words(text):\n    return text.lower().split()\n\n\ndef title(text):\n    return text\n"
)
FILES = {
    "helpers.py": HELPERS,
    "weights.json": '{"great": 1.0}',
    "reviews.csv": "id,text,shop\n1,great sound,a\n2,slow,b\n",
}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the example of identity.md, after a run."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "dont_write_bytecode", True)
        patched.syspath_prepend(str(folder))
        rows_to_compute(folder, "", "", run=True)
        yield folder


def rows_to_compute(folder: Path, before: str, after: str, run: bool = False) -> dict[str, int]:
    """Return the rows that each stage would compute after an edit of a file of the example."""
    code = block((CONCEPTS / "identity.md").read_text(), "An example")
    edits = {"reviews.py": code, **FILES}
    edited = next(name for name, text in edits.items() if before in text)
    edits[edited] = edits[edited].replace(before, after)
    for name, text in edits.items():
        (folder / name).write_text(text)
    with imported(edits["reviews.py"], "reviews", folder) as module:
        if run:
            module.reviews.run(store=str(folder / "store"))
        plan = module.reviews.plan(store=str(folder / "store"), rows=True).to_dict()
    del sys.modules["helpers"]
    return {stage["stage"]: stage["rows"] for stage in plan["stages"]}


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ("LIMIT = 512", "LIMIT = 256", 2),
        ("text[:LIMIT]", "text[1:LIMIT]", 2),
        ("text.lower()", "text.upper()", 2),
        ('{"great": 1.0}', '{"great": 2.0}', 2),
        ('"DOUBLE"', '"FLOAT"', 2),
        ("PAGE = 20", "PAGE = 30", 0),
        ("counts: Sentiment names it", "is a limit", 0),
        ("    return text\n", "    return text.title()\n", 0),
        ("batch_size=64", "batch_size=32, concurrency=2", 0),
        ("columns=", "include_columns=True, columns=", 0),
        ("1,great sound,a", "1,great view,a", 1),
        ("1,great sound,a\n2,slow,b\n", "2,slow,c\n3,great sound,a\n4,new,d\n", 1),
    ],
)
def test_an_edit_recomputes_what_identity_says(
    reviews: Path, before: str, after: str, rows: int
) -> None:
    assert rows_to_compute(reviews, before, after)["sentiment"] == rows


def test_a_line_that_is_no_json_costs_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"review_id":"a","stars":1}\n{"review_id":"b"\n')
    monkeypatch.chdir(tmp_path)
    code = block((CONCEPTS / "sources.md").read_text(), "Rows that cannot be read")
    with imported(code, "lines", tmp_path) as module:
        module.lines.run(store="store")
        rows = vd.load(module.parsed, store="store")
        assert rows.select(["review_id", "stars"]).to_pylist() == [{"review_id": "a", "stars": 1}]
        (failed,) = vd.quarantine(module.parsed, store="store").to_pylist()
    assert failed["id"].endswith("data/a.jsonl#1")
