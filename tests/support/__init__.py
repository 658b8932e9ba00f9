"""Shared helpers of the tests, and scripts that tests start as processes."""
