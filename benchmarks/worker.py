"""The process of one contender: `python -m benchmarks.worker run|serve job.json answer.json`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.job import Job


def answer(path: Path, values: dict[str, Any]) -> None:
    """Write an answer atomically, because the harness polls for the file.

    Args:
        path: The file.
        values: The content.
    """
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.rename(path)


def main() -> None:
    """Run a job's steps, or serve its cluster until standard input closes."""
    role, job_path, answer_path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    job = Job.load(job_path)
    contender = importlib.import_module(job.contender)
    if role == "run":
        answer(answer_path, asdict(contender.run(job)))
        if getattr(contender, "EXIT_AT_ONCE", False):
            os._exit(0)
        return
    with contender.serve(job) as service:
        answer(answer_path, dict(service))
        sys.stdin.read()


if __name__ == "__main__":
    main()
