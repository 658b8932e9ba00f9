"""Pipelines as Dagster assets, and the resources that they run on."""
