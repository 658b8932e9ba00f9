"""Pipelines as Dagster assets, and the resources they use."""
