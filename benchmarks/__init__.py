"""The same work through a bare loop, Ray Data, Daft and vane_dagster, in one run."""
