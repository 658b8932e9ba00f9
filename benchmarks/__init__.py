"""Benchmarks of the same work with a bare loop, Ray Data, Daft and vane_dagster."""
