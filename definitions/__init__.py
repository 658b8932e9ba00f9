"""The demo: semantic search over the documentation of Python's standard library.

Two pipelines share one warm model: `docs` embeds the documentation, `questions` the questions that
people asked.
"""
