"""The comparison with an earlier commit: ratios of pairs, and the limit."""

from __future__ import annotations

import pytest

from benchmarks import smoke


def pair(**slower: float) -> dict[str, dict[str, float]]:
    base = dict.fromkeys(smoke.CASES, 2.0)
    return {"base": base, "this": {case: 2.0 * slower.get(case, 1.0) for case in smoke.CASES}}


def compared(monkeypatch: pytest.MonkeyPatch, *pairs: dict[str, dict[str, float]]) -> int:
    """The exit code of a comparison that measures these pairs."""
    left = {side: [one[side] for one in pairs] for side in ("base", "this")}
    monkeypatch.setattr(smoke, "_environment", lambda folder, commit: "base" if commit else "this")
    monkeypatch.setattr(smoke, "_measure", lambda python, folder, name: left[python].pop(0))
    monkeypatch.setattr(smoke, "_commit", lambda base: "0123456789abcdef")
    return smoke.main(["--pairs", str(len(pairs)), "--rows", "1000"])


def test_a_case_that_is_slower_in_most_pairs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, pair(warm=1.2), pair(warm=1.3), pair()) == 1
    printed = capsys.readouterr().out
    assert "| warm | 2.00 | 2.40 | 1.20 |" in printed
    assert printed.endswith("Slower than 1.15 times the base: warm\n")


def test_one_slow_pair_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, pair(), pair(cold=3.0), pair(rows=0.5)) == 0
