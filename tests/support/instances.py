"""Dagster's instances made cheap: each run without an instance creates an ephemeral one.

An ephemeral instance has two new SQLite databases in memory. To create them takes Dagster as long
as a small pipeline takes to run: it marks each with the revision of its schema, for which Alembic
loads all migrations that ever were, though nothing reads the mark of a database in memory. And
SQLAlchemy compiles every statement again, because it remembers them by engine. For databases in
files, Dagster creates an engine with each connection.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._core.storage.event_log import in_memory as events
from dagster._core.storage.event_log.sqlite import sqlite_event_log as event_files
from dagster._core.storage.runs import in_memory as runs
from dagster._core.storage.runs.sqlite import sqlite_run_storage as run_files
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage as schedule_files
from sqlalchemy.pool import QueuePool


@contextmanager
def cheap_instances() -> Iterator[None]:
    """Instances that load migrations once; ephemeral ones share tables and compiled statements."""
    with pytest.MonkeyPatch.context() as patch:
        for module, tables in (
            (events, "SqlEventLogStorageMetadata"),
            (runs, "RunStorageSqlMetadata"),
        ):
            copying = SimpleNamespace(create_all=_copying(getattr(module, tables).create_all))
            patch.setattr(module, tables, copying)
            # Dagster opens a connection for each statement; these are kept.
            kept = {"poolclass": QueuePool, "connect_args": {"check_same_thread": False}}
            patch.setattr(module, "create_engine", _sharing(module.create_engine, **kept))
            patch.setattr(module, "stamp_alembic_rev", lambda *of: None)
        for module in (event_files, run_files, schedule_files):
            patch.setattr(module, "create_engine", _once(_sharing(module.create_engine)))
        patch.setattr(ScriptDirectory, "from_config", _remembering(ScriptDirectory.from_config))
        yield


def _sharing(
    create_engine: Callable[..., sqlalchemy.Engine], **options: Any
) -> Callable[..., sqlalchemy.Engine]:
    """Let all engines have the dialect of the first, which knows its compiled statements."""
    first: list[sqlalchemy.Engine] = []

    def create(url: str, **given: Any) -> sqlalchemy.Engine:
        engine = create_engine(url, **{**given, **options})
        first[:] = first or [engine]
        engine.dialect = first[0].dialect
        engine._compiled_cache = first[0]._compiled_cache
        return engine

    return create


def _once(create_engine: Callable[..., sqlalchemy.Engine]) -> Callable[..., sqlalchemy.Engine]:
    """Create one engine for each file. These engines keep no connections."""
    engines: dict[str, sqlalchemy.Engine] = {}

    def create(url: str, **given: Any) -> sqlalchemy.Engine:
        if url not in engines:
            engines[url] = create_engine(url, **given)
        return engines[url]

    return create


def _copying(
    create_all: Callable[[sqlalchemy.Connection], None],
) -> Callable[[sqlalchemy.Connection], None]:
    """Copy the tables from a database that has them, rather than create them one by one."""
    template = sqlite3.connect(":memory:", check_same_thread=False)

    def copied(connection: sqlalchemy.Connection) -> None:
        database = connection.connection.driver_connection
        assert isinstance(database, sqlite3.Connection)
        if template.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            create_all(connection)
            database.backup(template)
        else:
            template.backup(database)

    return copied


def _remembering(from_config: Callable[[Config], ScriptDirectory]) -> Any:
    """Load the migrations of each kind of database once."""
    loaded: dict[str | None, ScriptDirectory] = {}

    def remembered(config: Config) -> ScriptDirectory:
        folder = config.get_main_option("script_location")
        if folder not in loaded:
            loaded[folder] = from_config(config)
        return loaded[folder]

    return remembered
