"""The examples, each run as its reader would run it: twice, by its file name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# What an example prints besides its counts, as a pattern over the whole output.
PRINTED = {
    "async_api": r"'german': 'gut Morgen 0'.*'german': 'gut Nacht 1'",
    "checks": r"monday: rated/drift_stars passed.*monday: rated/stars_are_few passed.*"
    r"tuesday: rated/drift_stars WARN: .* monday .*tuesday: rated/golden passed",
    "chunks": r"kettle: 4 chunks, .*'kettle-0', 'sentence': 'Fill the kettle.*"
    r"found in radio-1 of radio: Turn the left knob",
    "cpu_preprocess": r"urgency 2: please reply today \(3 words\).*urgency 6: server down",
    "own_provider": r"3 lamps to Rome.*7 desks to Paris.*"
    r"set aside, id 2: The answer is no JSON.*cost 0\.0",
    "partitioned": r"2026-01-05 strangest: .*'anomaly': 3\.37",
    "read_outputs": r"turnover: \d+\.0.* ann +0\.2.* dan +0\.7.*risky: \d+.*at most risk: 51\b.*"
    r"returns/source +id 51.*returns/risks +id 51; map_batches of priced.*returns/joined",
    "sentence_transformer": r"The parcel arrived two days late\. +is most like: Delivery took far",
    "sklearn_function": r"iris-000 is a setosa \(9\d%\).*iris-120 is a virginica",
    "test_my_pipeline": r"rated computed.*3 passed",
    "torch_numpy": r"1\.52 from the centre: inside 0\.0.*1\.46 from the centre: inside 0\.0",
    "two_models": r"delivery \(0\.\d\d\): My package never arrived.*account +\(.*product +\(",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One cluster and one folder of data for all examples, apart from the reader's own."""
    with tempfile.TemporaryDirectory(prefix="vx-", dir="/tmp") as home:
        variables = {
            **os.environ,
            "VANE_DAGSTER_HOME": home,
            "VANE_EXAMPLES": str(tmp_path_factory.mktemp("examples")),
            "DAGSTER_DISABLE_TELEMETRY": "1",
        }
        try:
            yield variables
        finally:
            stop = "from vane_dagster.execute.cluster import LocalHead; LocalHead().stop()"
            subprocess.run([sys.executable, "-c", stop], env=variables, check=True)


def run(name: str, environment: dict[str, str]) -> tuple[str, list[int]]:
    """What an example printed, and the numbers of fragments that its stages computed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, [int(n) for n in re.findall(r"computed: (\d+)", done.stdout)]


def test_every_example_is_run_here_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(PRINTED)
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(PRINTED)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_example(name: str, environment: dict[str, str]) -> None:
    printed, computed = run(name, environment)
    assert re.search(PRINTED[name], printed, re.DOTALL), printed
    assert computed, printed
    assert set(computed) == {1}, printed

    again, nothing = run(name, environment)
    assert re.search(PRINTED[name], again, re.DOTALL), again
    assert nothing == [0] * len(computed), again
