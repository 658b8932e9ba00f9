"""Components of the demo, which Dagster finds by their files `defs.yaml`."""
