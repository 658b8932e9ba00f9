"""The identity of code in scripts, in cells of notebooks, and without any source."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from support.cells import digests_of_cells
from vane_dagster.fingerprint.code import code_identity


def test_script_functions_are_found_by_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"

    def digest(text: str, edited: str | None = None) -> str:
        main = types.ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        script.write_text(text)
        exec(compile(text, str(script), "exec"), main.__dict__)
        script.write_text(edited or text)
        return code_identity(main.udf).digest  # type: ignore[attr-defined]

    body = "K = 1\ndef helper(b):\n    return b + K\ndef udf(b):\n    return helper(b)\n"
    negated = body.replace("return helper", "return -helper")
    assert digest("# moved\n\n" + body) == digest(body)
    assert digest(body.replace("K = 1", "K = 2")) != digest(body)
    assert digest(body, edited=negated) != digest(negated), "the script runs as it was"


def test_notebook_cells_count_by_their_source() -> None:
    first, noted, words, code, size = digests_of_cells("cells")
    assert noted == first
    for edited in (words, code):
        assert [a != b for a, b in zip(edited, first)] == [True, True, False, False]
    assert [a != b for a, b in zip(size, first)] == [False, False, True, True]


def test_code_without_any_source_counts_by_its_bytecode() -> None:
    first, _, words, code, _ = digests_of_cells("")
    for edited in (words, code):
        assert set(edited[:2]).isdisjoint(first[:2])
