"""The comparison with an earlier commit: ratios of pairs, and the limit."""

from __future__ import annotations

import pytest

from benchmarks import smoke


def compared(monkeypatch: pytest.MonkeyPatch, *sessions: dict[str, float]) -> int:
    """The exit code of a comparison in which some cases take so many times the base's seconds."""
    measured = iter(sessions)

    def measure(sides: object, folder: object, number: int) -> object:
        slower = next(measured)
        return [(case, {"base": 2.0, "this": 2.0 * slower.get(case, 1.0)}) for case in smoke.CASES]

    monkeypatch.setattr(smoke, "_environment", lambda folder, commit: "base" if commit else "this")
    monkeypatch.setattr(smoke, "_measure", measure)
    monkeypatch.setattr(smoke, "_commit", lambda base: "0123456789abcdef")
    return smoke.main(["--sessions", str(len(sessions)), "--rows", "1000"])


def test_a_case_that_is_slower_in_most_pairs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, {"warm": 1.2}, {"warm": 1.3}, {}) == 1
    printed = capsys.readouterr().out
    assert "| warm | 2.00 | 2.40 | 1.20 | 3 |" in printed
    assert printed.endswith("Slower than 1.15 times the base: warm\n")


def test_one_slow_pair_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, {}, {"cold": 3.0}, {"rows": 0.5}) == 0
