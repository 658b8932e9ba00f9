"""Entry point of ``python -m vane_dagster``, equivalent to ``vane-dagster``."""

from vane_dagster.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m vane_dagster")
