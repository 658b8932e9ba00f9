"""Pools of workers and their backends: local subprocesses and Ray clusters."""
