"""Arguments of resources that Dagster resolves when a run starts."""

from __future__ import annotations

from typing import Any

import dagster as dg

import vane_dagster as vd


def seen(compute: Any, config: dict[str, Any] | None = None) -> Any:
    """The resource that an asset gets."""
    found = []

    @dg.asset
    def looks(compute: dg.ResourceParam[Any]) -> None:
        found.append(compute)

    resources = {"compute": compute}
    done = dg.materialize([looks], resources=resources, run_config=config)
    assert done.success
    return found[0]


def test_variables_and_arguments_of_the_launch_work(monkeypatch):
    monkeypatch.setenv("VANE_TEST_ROOT", "/from/variable")
    assert seen(vd.FragmentStore(root=dg.EnvVar("VANE_TEST_ROOT"))).root == "/from/variable"
    options = {"client_kwargs": {"login": dg.EnvVar("VANE_TEST_ROOT")}, "n": 1}
    store = seen(vd.FragmentStore(root="/here", storage_options=options))
    resolved = {"client_kwargs": {"login": "/from/variable"}, "n": 1}
    assert store.open().root.storage_options == resolved
    config = {"resources": {"compute": {"config": {"num_cpus": 3}}}}
    assert seen(vd.LocalCompute.configure_at_launch(), config).num_cpus == 3
