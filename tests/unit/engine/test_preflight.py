"""What preflight refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.variables import Variables
from vane_dagster.engine.preflight import (
    PreflightFinding,
    misplaced,
    missing_keys,
    other_variables,
    packed,
    refuse,
    too_large,
)
from vane_dagster.errors import PreflightError


def test_one_finding_stands_alone():
    with pytest.raises(PreflightError) as caught:
        refuse([PreflightFinding("a", "b", "c"), PreflightFinding("a", "b", "c")])
    assert str(caught.value) == "a: b. c"
    assert caught.value.findings == ("a: b. c",)
    refuse([])


# Environment variables


MODE = os.environ.get("VT_MODE", "plain")


class Reader:
    """Reads variables when its module is imported and when it is called."""

    def __call__(self, batch):
        return {"n": [MODE, os.getenv("VT_CALLED"), os.environ["PWD"]] and batch["n"]}


def node(**variables: str | None) -> Variables:
    """Those of a node with this process's environment, except for some variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        return Variables.here()


def noticed(there: Variables | None, **given: Any) -> list[str]:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    docs.map_batches("read", Reader, schema={"n": "BIGINT"}, **grouped(given))
    return list(other_variables(docs, packed(docs, ["read"])[1], there))


@pytest.mark.parametrize("here", [None, "new"])
@pytest.mark.parametrize("there", [None, "old", "new"])
@pytest.mark.parametrize("name", ["VT_MODE", "VT_CALLED"])
def test_a_variable_that_differs_is_named_without_its_values(name, here, there, monkeypatch):
    if here:
        monkeypatch.setenv(name, here)
    found = noticed(node(**{name: there}))
    if here == there:
        assert found == []
        return
    (text,) = found
    assert text == (
        f"stage 'docs/read': its code names '{name}'; environment variables of these names differ "
        "between this run and the workers, which have the environment of the process that started "
        "the Ray cluster. If the code reads them, send them: "
        f"vd.Workers(env_vars=['{name}']), or keyed_env_vars if they change results"
    )
    assert here is None or here not in repr(node(**{name: here})), "values are not sent"


def test_a_variable_that_is_sent_is_not_named():
    other = node(VT_MODE="old", VT_CALLED="old")
    assert noticed(other, env_vars=["VT_MODE"], keyed_env_vars=["VT_CALLED"]) == []
    assert "env_vars=['VT_CALLED']" in noticed(other, env_vars=["VT_MODE"])[0]
    assert noticed(other, execution_backend="subprocess_actor") == []
    assert noticed(None) == []


def test_variables_of_the_process_are_not_compared():
    there = node(PWD="/elsewhere", OMP_NUM_THREADS="7", RAY_JOB_ID="1", LANG="none", UNREAD="1")
    names = ["PWD", "OMP_NUM_THREADS", "RAY_JOB_ID", "LANG", "surrogate \ud800", ""]
    assert there.differing(names) == ["LANG"]


GROWING = Capacity(({"CPU": 8.0},), 0, adds_nodes=True)
SEVERAL = Capacity(({"CPU": 8.0}, {"CPU": 8.0}), 0)
KEY = "OPENAI_API_KEY"


def keyless(capacity: Capacity, there: Variables | None = None, **given: Any) -> list[str]:
    """What is found for a prompt of which the driver has no key, nor the workers by default."""
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    docs.prompt("ask", "{text}", **grouped({"provider": "openai", "model": "m", **given}))
    there = node() if there is None and capacity.is_cluster else there
    return [str(found) for found in missing_keys(docs, ["ask"], capacity, there)]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, KEY),
        ({"env_vars": [KEY]}, KEY),
        ({"provider": "anthropic"}, "ANTHROPIC_API_KEY"),
        ({"model": vd.Model("m", options={"api_key_env": "MY_KEY"})}, "MY_KEY"),
        ({"model": vd.Model("m", options={"base_url": "http://127.0.0.1:9"})}, KEY),
    ],
)
def test_a_key_that_is_set_nowhere_is_refused(given, name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    (local,), (ray,) = keyless(MACHINE, **given), keyless(CLUSTER, **given)
    kind = "AnthropicProvider" if "provider" in given else "OpenAIProvider"
    needs = f"stage 'docs/ask': {kind}('m') needs a key in the environment variable {name!r}, which"
    without = "An endpoint that needs no key has the option api_key_env=None"
    there = f"{needs} its workers do not have. Set it where the run is launched"
    assert local == f"{there}. {without}"
    assert ray == f"{there}, and name it in vd.Workers(env_vars=[{name!r}]). {without}"


def test_a_key_that_is_not_sent_is_refused_on_a_cluster(monkeypatch):
    there = node(**{KEY: None})
    monkeypatch.setenv(KEY, "sk-here")
    assert len(keyless(CLUSTER, there)) == 1
    assert keyless(CLUSTER, there, env_vars=[KEY]) == []
    assert keyless(CLUSTER, there, keyed_env_vars=[KEY]) == []
    assert keyless(CLUSTER, there, execution_backend="subprocess_actor") == []
    assert keyless(MACHINE) == []


def test_what_would_work_without_a_key_is_not_refused(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    assert keyless(CLUSTER, node(**{KEY: "sk-there"})) == []
    assert len(keyless(CLUSTER, node(**{KEY: ""}))) == 1
    assert keyless(GROWING) == [], "a node that the autoscaler adds may have it"
    assert keyless(SEVERAL) == [], "nodes may differ"
    assert keyless(MACHINE, model=vd.Model("m", options={"api_key_env": None})) == []
    assert keyless(MACHINE, model=vd.VLLMServer("m")) == []
    assert keyless(MACHINE, provider="vllm") == []


class OwnProvider:
    """A user's provider with a key."""

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
    """Returns its batch."""

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
    assert str(finding) == (
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
    here, there = sorted(str(found) for found in too_large(docs, stages, CLUSTER))
    assert here.startswith(
        "stage 'docs/here': Model: 1 worker of 1 GPU was asked for; this machine has 0 GPU "
        "for subprocesses. Lower concurrency or what a worker reserves, or use a larger machine. "
        "GPUs that this machine gives to the Ray cluster do not count"
    )
    assert there.startswith("stage 'docs/license_there': Model: 1 worker of 1 license was")
    assert list(too_large(docs, stages[3:], MACHINE)) == []
