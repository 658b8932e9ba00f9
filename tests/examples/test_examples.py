"""The examples, each run as its reader would run it: twice, by its file name.

Those that load a model are in `test_model_examples.py` and `test_framework_examples.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import forked
from support.example_runs import (  # noqa: F401  # fixtures
    EXAMPLES,
    ON_FRAMEWORKS,
    ON_MODELS,
    PRINTED,
    example_cluster,
    runs_twice,
)
from support.llm_server import KEY, Server


@pytest.fixture(scope="module")
def environment(example_cluster: dict[str, str]) -> dict[str, str]:
    head = "from vane_dagster.compute.local_head import LocalHead; LocalHead(num_cpus=2).ensure()"
    forked.run(["-c", head], example_cluster, EXAMPLES, 60, forked.EXAMPLE).check_returncode()
    return example_cluster


def test_every_example_is_run_here_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(PRINTED)
    listed = re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(PRINTED)


@pytest.mark.parametrize(
    "name", sorted(PRINTED.keys() - {"api_rate_limits", *ON_FRAMEWORKS, *ON_MODELS})
)
def test_example(name: str, environment: dict[str, str]) -> None:
    runs_twice(name, environment)


def test_a_busy_api_is_asked_again_and_its_key_is_not_kept(
    environment: dict[str, str], endpoint: tuple[Server, str], tmp_path: Path
) -> None:
    endpoint[0].clear()
    runs_twice("api_rate_limits", {**environment, "VANE_EXAMPLES": str(tmp_path)})
    times = {prompt: n for prompt, n in endpoint[0].requests.items() if n > 1}
    assert times == {"Write a slogan for a busy coffee machine.": 2}
    assert len(endpoint[0].requests) == 4
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
