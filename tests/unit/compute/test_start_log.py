"""What is told of the log of a head that did not start."""

from __future__ import annotations

from pathlib import Path

from vane_dagster.compute.local_head import _reason

LOG = """
Usage stats collection is disabled.

Local node IP: 127.0.0.1
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/env/ray/_private/services.py", line 2150, in determine_plasma_store_config
    raise ValueError(
ValueError: Attempting to cap object store memory usage at 1000 bytes, but the minimum allowed is \
78643200 bytes.
"""


def test_the_exception_at_the_end_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    found = _reason(tmp_path / "log")
    assert found.startswith("ValueError: Attempting to cap object store memory usage at 1000 bytes")
    assert "but the minimum allowed is" in found
    assert "Traceback" not in found
    assert "\n" not in found


def test_the_last_lines_of_a_log_without_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {n}\n\n" for n in range(9)))
    assert _reason(tmp_path / "log") == "line 4 / line 5 / line 6 / line 7 / line 8"
    (tmp_path / "log").write_text("")
    assert _reason(tmp_path / "log") == "nothing"
