"""Arguments of resources: misspelt ones are refused, and Dagster's own ways to give them work."""

from __future__ import annotations

from pathlib import Path

import pytest

import vane_dagster as vd


@pytest.mark.parametrize(
    ("resource", "given", "line"),
    [
        (vd.RayCompute, {"adress": "auto"}, "'adress' of vd.RayCompute. Did you mean 'address'?"),
        (vd.RayCompute, {"num_cpus": 2}, "write num_cpus=... at its cluster, vd.LocalCluster"),
        (vd.RayCompute, {"ray_address": "auto"}, "write address=..."),
        (vd.LocalCluster, {"zzz": "x"}, "its options are 'num_cpus', 'num_gpus', "),
        (vd.FragmentStore, {"rot": "/x"}, "'rot' of vd.FragmentStore. Did you mean 'root'?"),
    ],
)
def test_an_unknown_argument_is_refused(resource, given, line):
    with pytest.raises(vd.errors.DefinitionError) as refused:
        resource(**given)
    assert line in str(refused.value)


def test_a_subclass_has_arguments_of_its_own():
    class Dated(vd.FragmentStore):
        day: str

    assert Dated(root="/x", day="monday").day == "monday"
    assert Dated(root=Path("/x"), day="monday") == Dated(root="/x", day="monday")
    with pytest.raises(vd.errors.DefinitionError, match=r"'dai' of vd\.Dated\. Did you mean 'day'"):
        Dated(root="/x", dai="monday")


def test_values_without_names_are_refused():
    for kind in (vd.FragmentStore, vd.LocalCompute, vd.RayCompute):
        with pytest.raises(
            vd.errors.DefinitionError, match=f"{kind.__name__} takes its arguments by na"
        ):
            kind("x")
