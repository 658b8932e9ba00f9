"""Runs the tests, and those that failed once more, alone: ``tests.py make test-all``.

A test that fails twice fails. The last line is pytest's summary, with a count of the tests that
passed at the second try. It is repeated because libraries may print while Python exits.
"""

from __future__ import annotations

import re
import subprocess
import sys

MOST_RETRIED = 25
_SUMMARY = re.compile(
    r"^(?:=+ )?((?:\d+ |no tests ran)[\w ,]*\bin \d[\d.]*s(?: \([\d:, a-z]+\))?)(?: =+)?$"
)
_COUNT = re.compile(r"(\d+) (failed|errors?|passed)\b")
_NOT_ALL_RAN = ("Interrupted:", "INTERNALERROR>", "stopping after")
AGAIN = "PYTEST_ARGS=-n 0 --last-failed --last-failed-no-failures none"


def run(command: list[str]) -> tuple[int, str, bool]:
    """The exit status, pytest's summary, and whether all tests ran; prints what pytest prints."""
    summary, whole = "", True
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := _SUMMARY.match(line.strip()):
                summary = found[1]
            whole = whole and not any(mark in line for mark in _NOT_ALL_RAN)
    return process.returncode, summary, whole


def counts(summary: str) -> dict[str, int]:
    """How many tests failed, had an error, and passed."""
    found = {"failed": 0, "error": 0, "passed": 0}
    for number, name in _COUNT.findall(summary):
        found[name.removesuffix("s")] += int(number)
    return found


def main(command: list[str]) -> int:
    """Runs the tests, and again those that failed; gives the exit status."""
    status, summary, whole = run(command)
    first = counts(summary)
    failed = first["failed"] + first["error"]
    if status and whole and 0 < failed <= MOST_RETRIED:
        print(f"\n{failed} failed; once more, alone:", flush=True)
        status, second, whole = run([*command, AGAIN])
        again = counts(second)
        # What failed as it was torn down had passed too, so that it may be fewer tests.
        ran = again["passed"] + again["failed"] + again["error"]
        if not (whole and 0 < ran <= failed):
            status = status or 1
        rest = [f"{again['passed']} passed at the second try"]
        if again["failed"] + again["error"]:
            rest.insert(0, f"{again['failed'] + again['error']} failed twice")
        parts, _, took = summary.rpartition(" in ")
        others = [part for part in parts.split(", ") if not _COUNT.match(part) or "passed" in part]
        summary = f"{', '.join([*rest, *others])} in {took} and once more"
    print(f"===== {summary or 'pytest gave no summary'} =====", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
