"""The sections of a worker's logs."""

from __future__ import annotations

from vane_dagster.worker.log_sections import sections


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
