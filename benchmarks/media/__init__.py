"""Four media workloads, from files to Parquet, through Ray Data, Daft and vane_dagster."""
