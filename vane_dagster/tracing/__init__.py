"""Tracing: from a row back to its source file, and forward to every row made from it."""
