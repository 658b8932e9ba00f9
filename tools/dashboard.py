"""Evaluates the expressions of the dashboard in a Prometheus: `python tools/dashboard.py URL`.

Prints the number of series of each, and their sum. Exit code 1: one is not valid, or has none.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "vane-dagster.json"
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$pipeline": ".*"}


def expressions() -> list[tuple[str, str]]:
    """Return the expressions of the dashboard's panels, with Grafana's variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    return found


def evaluated(url: str, expression: str) -> list[dict[str, Any]]:
    """Return the series of an expression, from Prometheus' HTTP API."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
        series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return series


def main(url: str) -> int:
    """Print what each expression has; return the number of those without a series."""
    empty = 0
    for title, expression in expressions():
        try:
            series = evaluated(url, expression)
        except urllib.error.HTTPError as error:
            print(f"{title}: not valid: {error.read().decode()}")
            empty += 1
            continue
        empty += not series
        total = sum(float(each["value"][1]) for each in series)
        print(f"{title}: {len(series)} series, {total:,.4g} in all")
    return empty


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1]) else 0)
