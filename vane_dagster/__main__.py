"""``python -m vane_dagster``: the same as ``vane-dagster``."""

from vane_dagster.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m vane_dagster")
