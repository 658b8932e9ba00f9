"""Pools of workers and where they live: the local backend, Ray, clusters."""
