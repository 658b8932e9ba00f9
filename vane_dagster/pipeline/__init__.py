"""Pipelines as data, validated where the user wrote them. No Ray, no torch, no I/O."""
