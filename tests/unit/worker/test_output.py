"""What a worker's process writes to its streams, and the sections of its logs."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from vane_dagster.worker import output
from vane_dagster.worker.log_sections import sections
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.reports import Output


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OutputTap]]:
    def installed(stdout: io.StringIO | None) -> OutputTap:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stdout)
        monkeypatch.setattr(OutputTap, "_instance", None)
        return OutputTap.installed()

    make = logging.getLogRecordFactory()
    yield installed
    logging.setLogRecordFactory(make)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("0%\r50%\r100%\nnext", "100%\nnext"),
        ("epoch 1\repoch 2\r", "epoch 2\r"),
        ("first\r\nsecond\r\n", "first\r\nsecond\r\n"),
        ("100%\r    \r", ""),
        (
            "x" * 1_000_000,
            output._CUT + "x" * 64_000,
        ),  # one line, in time that grows with its length
        ("\udcff\0", "\\udcff\\x00"),
    ],
)
def test_the_log_has_what_a_terminal_would_show(tap, written, kept):
    made = tap(io.StringIO())
    print(written, end="")
    assert (made.drain(), made.drain()) == (Output(kept), Output())


class Gone(io.StringIO):
    """A stream whose other end is closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, Gone(), io.StringIO()])
def test_a_stream_that_is_closed_or_gone_costs_no_row(tap, stream):
    made = tap(stream)
    with sys.stdout as through:
        through.write("a\n")
    sys.stdout.close()
    print("b", flush=True)
    assert made.drain().text == "a\nb\n"
    sys.stderr.close()


def test_a_line_separates_what_runs_and_stages_wrote(tmp_path):
    log = tmp_path / "worker-1.out"
    log.write_text(
        "ray starts\n"
        "--- vane-dagster: run aa11, stages docs/a,docs/b, worker w ---\nconstructs\n"
        "--- vane-dagster: run aa11, stages docs/a, worker w ---\nrow 1\n1 of 9"
        "--- vane-dagster: run bb22, stages docs/a, worker w ---\nrow 2\n"
        "--- vane-dagster: run aa11, stages docs/a, worker w ---\nrow 3"
    )
    (tmp_path / "raylet.out").write_text(
        "--- vane-dagster: run aa11, stages docs/a, worker w ---\n"
    )

    def lines(run: str, stage: str) -> list[str]:
        found = list(sections([tmp_path], run, stage))
        assert {(each.worker, each.file) for each in found} <= {("w", str(log))}
        return [line for each in found for line in each.lines]

    assert lines("aa", "docs/a") == ["constructs", "row 1", "1 of 9", "row 3"]
    assert lines("aa11", "docs/b") == ["constructs"]
    assert lines("bb22", "docs/a") == ["row 2"]
    assert [each.run for each in sections([tmp_path], "", "docs/a")] == ["aa11", "bb22", "aa11"]
    assert lines("aa11", "docs") == lines("cc", "docs/a") == []
    (tmp_path / "worker-1.err").write_text(
        "--- vane-dagster: run cc33, stages docs/a, worker w ---\n"
        "--- vane-dagster: run bb22, stages docs/b, worker w ---\nrow 1"
    )
    (silent,) = sections([tmp_path], "cc33", "docs/a")
    assert (silent.run, silent.lines) == ("cc33", [])
