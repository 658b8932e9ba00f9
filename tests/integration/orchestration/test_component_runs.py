"""Runs of a `PipelineComponent`."""

from __future__ import annotations

import types

import dagster as dg

import vane_dagster as vd


def test_a_subclass_changes_specs_and_steps(tmp_path):
    rows = [{"id": 1, "text": "good"}]
    docs = vd.Pipeline("subclassed", source=vd.table(rows), id="id")
    docs.project("clean", {"text": "trim(text)"})
    seen = []

    class Noting(vd.PipelineComponent):
        def get_asset_spec(self, stage):
            return super().get_asset_spec(stage).replace_attributes(owners=["team:nlp"])

        def execute(self, context, pipeline, config, compute, store):
            seen.append((pipeline.name, config.force))
            yield from super().execute(context, pipeline, config, compute, store)

    component = Noting(
        pipeline=docs, compute=vd.LocalCompute(), store=vd.FragmentStore(root=tmp_path)
    )
    definitions = component.build_defs(dg.ComponentTree.for_test().load_context)
    key = dg.AssetKey(["subclassed", "clean"])
    (spec,) = [each for each in definitions.resolve_all_asset_specs() if each.key == key]
    assert list(spec.owners) == ["team:nlp"]
    assert definitions.resolve_implicit_global_asset_job_def().execute_in_process().success
    assert seen == [("subclassed", False)]


def test_assets_whose_keys_were_changed_are_refused_before_anything_is_computed(tmp_path):
    docs = vd.Pipeline("prefixed", source=vd.table([{"id": 1, "text": "good"}]), id="id")
    docs.project("clean", {"text": "trim(text)"})
    module = types.ModuleType("module")
    vars(module)["assets"] = docs.build_assets()
    definitions = dg.Definitions(
        dg.load_assets_from_modules([module], key_prefix="q"),
        resources={"compute": vd.LocalCompute(), "store": vd.FragmentStore(root=str(tmp_path))},
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(raise_on_error=False)
    assert not result.success
    (failed,) = result.filter_events(lambda event: event.is_step_failure)
    assert "'q/prefixed/clean'; expected the keys" in failed.step_failure_data.error_display_string
    assert [*tmp_path.iterdir()] == []
