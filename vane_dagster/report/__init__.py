"""What a run tells Dagster and its user: events, metadata, progress."""
