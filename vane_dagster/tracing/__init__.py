"""Tracing: from a row back to the source file, and from a row to all that was made of it."""
