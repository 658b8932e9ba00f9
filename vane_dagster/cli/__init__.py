"""The command line, ``vane-dagster``."""
