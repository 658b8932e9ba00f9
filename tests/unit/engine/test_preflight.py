"""What preflight refuses, and local files that changed since the plan."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from support.in_process import InProcessCompute
from vane_dagster.compute.api import Capacity
from vane_dagster.engine import executor
from vane_dagster.engine.preflight import (
    misplaced,
    missing_keys,
    refuse,
    too_large,
)
from vane_dagster.errors import CodeIdentityError, PreflightError
from vane_dagster.fingerprint.local_file import local_file


def test_one_finding_stands_alone():
    with pytest.raises(PreflightError) as caught:
        refuse(["a: b. c", "a: b. c"])
    assert str(caught.value) == "a: b. c"
    assert caught.value.findings == ("a: b. c",)
    refuse([])


# Keys

KEY = "OPENAI_API_KEY"


def keyless(capacity: Capacity, **given: Any) -> list[str]:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    docs.prompt("ask", "{text}", **grouped({"provider": "openai", "model": "m", **given}))
    return list(missing_keys(docs, ["ask"], capacity))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"env_vars": [KEY]}, KEY),
        ({"provider": "anthropic", "keyed_env_vars": ["ANTHROPIC_API_KEY"]}, "ANTHROPIC_API_KEY"),
        (
            {
                "model": vd.Model("m", options={"api_key_env": "MY_KEY"}),
                "execution_backend": "subprocess_actor",
            },
            "MY_KEY",
        ),
    ],
)
def test_a_key_that_is_not_set_is_refused(given, name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    (local,), (ray,) = keyless(MACHINE, **given), keyless(CLUSTER, **given)
    kind = "AnthropicProvider" if "provider" in given else "OpenAIProvider"
    assert (
        local
        == ray
        == (
            f"stage 'docs/ask': {kind}('m') needs a key in the environment variable {name!r}, "
            "which its workers do not have. Set it where the run is launched. An endpoint that "
            "needs no key has the option api_key_env=None"
        )
    )
    monkeypatch.setenv(name, "sk-here")
    assert keyless(MACHINE, **given) == keyless(CLUSTER, **given) == []


def test_what_would_work_without_a_key_is_not_refused(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    assert keyless(CLUSTER) == [], "its workers may have it"
    assert len(keyless(MACHINE)) == 1
    assert keyless(MACHINE, model=vd.Model("m", options={"api_key_env": None})) == []
    assert keyless(MACHINE, model=vd.VLLMServer("m")) == []
    assert keyless(MACHINE, provider="vllm") == []


class OwnProvider:
    def __init__(self, model: str, key: str = "OWN_KEY") -> None:
        self.model, self.key = model, key

    @classmethod
    def key_variable(cls, options: Mapping[str, Any]) -> str | None:
        return options.get("key", "OWN_KEY")

    async def submit(self, request):
        raise NotImplementedError


def test_a_provider_of_the_user_may_name_its_key():
    (text,) = keyless(MACHINE, provider=OwnProvider)
    assert "OwnProvider('m') needs a key in the environment variable 'OWN_KEY'" in text
    assert (
        keyless(MACHINE, provider=OwnProvider, model=vd.Model("m", options={"key": "HOME"})) == []
    )


# Places


class Model:
    def __call__(self, batch):
        return {"n": batch["n"]}


MACHINE = Capacity(({"CPU": 2.0, "license": 1.0},), 0, is_cluster=False)
CLUSTER = Capacity(({"CPU": 8.0, "GPU": 2.0},), 0, driver=MACHINE)


def declared(**stages: dict[str, Any]) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    for name, given in stages.items():
        docs.map_batches(name, Model, schema={"n": "BIGINT"}, **grouped(given))
    return docs


def test_a_stage_for_ray_is_refused_without_a_cluster():
    names = {None: "plain", "ray_actor": "ray", "subprocess_actor": "own"}
    docs = declared(**{name: {"execution_backend": each} for each, name in names.items()})
    (finding,) = misplaced(docs, list(names.values()), MACHINE)
    assert finding == (
        "stage 'docs/ray': declares execution_backend='ray_actor', but the compute resource of "
        'this run is LocalCompute, which has no Ray cluster. Write execution_backend="subprocess_'
        'actor", or leave it out to compute where the resource says; or give the run a RayCompute'
    )
    assert list(misplaced(docs, list(names.values()), CLUSTER)) == []


def test_what_a_stage_reserves_is_compared_with_its_place():
    gpu, own = {"gpus": 1}, {"execution_backend": "subprocess_actor"}
    license = {"resources": {"license": 1}}
    docs = declared(
        there=gpu, here={**gpu, **own}, license_there=license, license_here={**license, **own}
    )
    stages = ["there", "here", "license_there", "license_here"]
    here, there = sorted(too_large(docs, stages, CLUSTER))
    assert here.startswith(
        "stage 'docs/here': Model asks for a worker of 1 GPU; this machine has 0 GPU "
        "for subprocesses. Lower concurrency or the resources of a worker, or use a larger "
        "machine. GPUs that this machine gives to the Ray cluster do not count"
    )
    assert there.startswith("stage 'docs/license_there': Model asks for a worker of 1 license;")
    assert list(too_large(docs, stages[3:], MACHINE)) == []


# Runs


class Loaded:
    """Leaves a file behind when it is constructed."""

    def __init__(self, trace: str) -> None:
        Path(trace).touch()

    def __call__(self, batch: Any) -> Any:
        return {"n": batch["n"]}


def locked() -> Any:
    lock = threading.Lock()

    def call(batch: Any) -> Any:
        with lock:
            return {"n": batch["n"]}

    return call


NOBODY_WRITES = "/proc/vane_dagster/folder"  # of root either


def refused(tmp_path: Path, compute: Any) -> str:
    """The error of a run with several problems, which loads, computes and leaves nothing."""
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
    clean = docs.project("clean", ["n"])
    given = {"schema": {"n": "BIGINT"}, "fn_constructor_args": [f"{tmp_path}/loaded"]}
    clean.map_batches("on_gpus", Loaded, gpus=8, **given)
    tape = vd.Workers(3, resources={"tape": 2})
    clean.map_batches("on_tape", Loaded, concurrency=tape, **given)
    own = {"schema": {"n": "BIGINT"}, "reuse": vd.Reuse(version="1")}
    clean.map_batches("locked", locked(), **own)
    clean.write("published", NOBODY_WRITES)
    with pytest.raises(vd.errors.VaneError) as raised:
        docs.run(store=str(tmp_path / "store"), compute=compute)
    assert not (tmp_path / "loaded").exists()
    left = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert {*left} <= {"_vane_store", "fragments.json"}
    return str(raised.value)


def test_all_problems_are_reported_at_once(tmp_path):
    write_source(tmp_path / "src", {"id": [1, 2, 3], "n": [10, 20, 30]})
    text = refused(tmp_path, InProcessCompute())
    for words in (
        "4 problems prevent this run; nothing was computed",
        "stage 'docs/on_gpus': Loaded asks for a worker of 8 GPU; this machine has 0",
        "stage 'docs/on_tape': Loaded asks for 3 workers of 2 tape each",
        "stage 'docs/locked': locked.<locals>.call: tuple cannot be pickled for the workers",
        f"target of stage 'docs/published': '{NOBODY_WRITES}/_vane_staging' cannot be written",
    ):
        assert text.count(words) == 1, f"{words!r} in\n{text}"


def test_a_plan_that_fails_connects_to_nothing(tmp_path):
    compute = vd.RayCompute(cluster=vd.LocalCluster(name="unstarted", num_cpus=1))
    assert "no Parquet file at" in refused(tmp_path, compute)


@pytest.mark.parametrize("change", ["edited", "edited while it is copied", "gone"])
def test_a_local_file_that_changed_since_the_plan_is_a_problem(
    tmp_path, store, change, monkeypatch
):
    """Else the rows would be stored under the key of other weights."""
    path = tmp_path / "weights"
    path.write_text("former")
    file = local_file(path)
    plan: Any = SimpleNamespace(
        pipeline=SimpleNamespace(name="docs"), files={"labels": {file: file.content()}}
    )
    upload = executor.upload

    def uploaded(*given: Any) -> Any:
        path.write_text("edited")
        return upload(*given)

    if change == "gone":
        path.unlink()
        with pytest.raises(
            CodeIdentityError, match=r"weights'\) cannot be read.*Restore it, or cor"
        ):
            executor._ship_files(plan, ["labels"], store, print)
        return
    if change == "edited":
        path.write_text("edited")
    else:
        monkeypatch.setattr(executor, "upload", uploaded)
    (problem,) = executor._ship_files(plan, ["labels"], store, print)
    assert "weights') was edited while the run started. Run" in str(problem)
