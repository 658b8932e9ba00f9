"""A server of PostgreSQL on this machine."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.heads import free_port


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server, and yield the URL of its database."""
    programs = [str(Path(each).parent) for each in glob.glob("/usr/lib/postgresql/*/bin/pg_ctl")]
    control = shutil.which("pg_ctl", path=os.pathsep.join([os.environ["PATH"], *programs]))
    if control is None:
        pytest.skip("PostgreSQL is not installed")
    user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
    port = free_port()
    folder = tempfile.mkdtemp(prefix="postgres-", dir="/tmp")  # which another user can enter
    if user:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        given = [control, "--pgdata", f"{folder}/data", "--silent", *command]
        subprocess.run(given, check=True, user=user, cwd=folder, stdin=subprocess.DEVNULL)

    run("init", "--options", "--auth=trust --username=postgres --no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run("start", "--log", f"{folder}/log", "--options", options)
    try:
        # named, since the default driver of SQLAlchemy is not that of dagster-postgres
        yield f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"
    finally:
        run("stop", "--mode", "immediate")
        shutil.rmtree(folder)
