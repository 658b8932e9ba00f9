"""One module for each contender: `run(job)`, and `serve(job)` where it needs a cluster."""
