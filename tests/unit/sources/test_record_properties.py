"""Rows of text files do not depend on where the files are cut: random CSV, JSON lines and text."""

from __future__ import annotations

import csv
import io
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.ingested import rows as read
from vane_dagster.sources import FragmentRule

WHOLE = FragmentRule(1 << 20)
BOM = b"\xef\xbb\xbf"
CUTS = st.builds(FragmentRule, st.integers(1, 4), st.integers(1, 400))
TEXTS = st.text(st.sampled_from('ab,"\n\r é;\t😀0'), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Let files be read in blocks of 64 bytes, and pieces have 120."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vane_dagster.sources.text_stream.BLOCK", 64)
        patch.setattr("vane_dagster.sources.piece_writer.PIECE_BYTES", 120)
        yield


def written(name: str, data: bytes) -> Path:
    folder = Path(tempfile.mkdtemp())
    (folder / name).write_bytes(data)
    return folder


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 99), TEXTS, TEXTS), min_size=1, max_size=12),
    newlines=st.sampled_from([["\n"], ["\r\n"], ["\r\n", "\n"], ["\n", "\n", "\r\n"]]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    is_ended=st.booleans(),
    has_bom=st.booleans(),
    blank=st.integers(0, 3),
    rule=CUTS,
)
@example(
    [(0, "0", '00"ééé'), (0, "00", "00000"), (0, "0\n", "0000\n")], ["\n"],
    csv.QUOTE_MINIMAL, False, False, 0, WHOLE,
)  # fmt: skip
def test_csv_that_was_written_is_read_back(rows, newlines, quoting, is_ended, has_bom, blank, rule):
    # csv does not quote a lone CR or LF of the other kind.
    has_newline = any(c in text for _, *texts in rows for text in texts for c in "\r\n")
    quoting = csv.QUOTE_ALL if has_newline else quoting
    buffer = io.StringIO(newline="")
    newline = ""
    for row, newline in zip([["n", "a", "b"], *rows], itertools.cycle(newlines)):
        csv.writer(buffer, quoting=quoting, lineterminator=newline).writerow(row)
        buffer.write(newline * (blank if row[0] != "n" and row[0] % 3 == 0 else 0))
    text = buffer.getvalue()
    text = text if is_ended else text.removesuffix(newline)
    folder = written("a.csv", (BOM if has_bom else b"") + text.encode())
    schema = {"n": "BIGINT", "a": "VARCHAR", "b": "VARCHAR"}
    source = vd.csv(str(folder), delimiter=",", schema=schema)
    expected = [(n, a, b) for n, a, b in rows]
    for cut in (rule, WHOLE):
        found = [(row["n"], row["a"] or "", row["b"] or "") for row in read(source, cut)]
        assert found == expected


@settings(max_examples=25, deadline=None)
@given(
    body=st.lists(st.sampled_from([*'ab1,,"\n\n\r é', '""', '"x"', "\r\n"]), max_size=30).map(
        "".join
    ),
    rule=CUTS,
)
@example('1,"x\n"\r\n2,"y\r\nz"\r\n', FragmentRule(1))
@example('1,"a"b\n2,3\n', FragmentRule(1))
def test_any_text_is_read_as_by_python_or_refused(body, rule):
    folder = written("a.csv", f"p,q\n{body}".encode())
    source = vd.csv(str(folder), delimiter=",", schema={"p": "VARCHAR", "q": "VARCHAR"})
    try:
        found = read(source, rule)
    except vd.errors.SourceError:
        return
    expected = [row for row in csv.reader(io.StringIO(body, newline="")) if row]
    assert [[row["p"] or "", row["q"] or ""] for row in found] == expected


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries({"n": st.integers(0, 99)}, optional={"s": TEXTS, "v": _VALUES}),
        min_size=1,
        max_size=10,
    ),
    between=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", " \n"]),
    is_ended=st.booleans(),
    has_bom=st.booleans(),
    rule=CUTS,
)
def test_json_lines_are_read_back(rows, between, is_ended, has_bom, rule):
    text = between.join(json.dumps(row, ensure_ascii=row["n"] % 2 == 0) for row in rows)
    text += between if is_ended else ""
    folder = written("a.jsonl", (BOM if has_bom else b"") + text.encode())
    source = vd.json(str(folder), schema={"n": "BIGINT", "s": "VARCHAR", "v": "VARCHAR"})
    found = read(source, rule)
    assert found == read(source, WHOLE)
    assert [row["n"] for row in found] == [row["n"] for row in rows]
    assert [row["s"] for row in found] == [row.get("s") for row in rows]
    for row, expected in zip(found, rows):
        value = expected.get("v")
        shown = row["v"] if isinstance(value, str) or row["v"] is None else json.loads(row["v"])
        assert shown == value
