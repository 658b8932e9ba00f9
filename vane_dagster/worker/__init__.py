"""The code that runs in a worker process, and nothing else."""
