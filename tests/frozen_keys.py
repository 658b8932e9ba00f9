"""Keys as they are in stores. `test_durable.py` says what to do where they change."""

STAGES = {}
CHECKS = {}
CODE = {}
