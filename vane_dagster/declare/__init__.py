"""Pipelines as data: what a user declares, validated where it was written. No Ray, no torch, no I/O."""
