"""Digests of files are kept for other processes."""

from __future__ import annotations

import subprocess
import sys

from support.settled_files import _AGO, _SIZE, home, later, settled  # noqa: F401  # fixtures
from vane_dagster.fingerprint.objects import value_digest


def test_content_is_kept_for_other_processes(tmp_path, home, later):
    file = settled(tmp_path / "weights.bin", b"x" * _SIZE)
    small = settled(tmp_path / "small.bin", b"x")
    here = value_digest([file, small])
    (record,) = (home / "file-digests").iterdir()
    assert record.stat().st_mode & 0o077 == 0 == record.parent.stat().st_mode & 0o077
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from vane_dagster.fingerprint.objects import value_digest\n"
        "print(value_digest([Path(name) for name in sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-c", code, str(file), str(small)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == [here], done.stderr
    record.write_text("0" * 64)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() != [here], "the large file was read again"
