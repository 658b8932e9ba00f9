"""Pinned schemas: the columns that the first run of a stage has inferred.

A pin is the file ``<root>/<pipeline>/<stage>/schemas/<definition>.json``. The definition is that of
the stage without its schema, and of all upstream stages. The file is created once; if several runs
infer at the same time, all use the schema that was written first. Fragment keys contain the schema
itself. So a lost pin may lead to other keys, but never to a part with other types.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from vane_dagster.storage.codec import Codec
from vane_dagster.storage.store import Store

SCHEMAS = "schemas"
"""The folder with the pins, below a stage's."""


@dataclass(frozen=True)
class SchemaPin:
    """An inferred schema.

    Attributes:
        schema: The columns, as if they had been declared.
        rows: The input rows that it was inferred from.
        run_id: The run that has inferred it.
        pinned_at: Unix time in seconds.
    """

    schema: pa.Schema
    rows: int
    run_id: str
    pinned_at: float


_CODEC = Codec(SchemaPin)


def read_pin(store: Store, pipeline: str, stage: str, definition: str) -> SchemaPin | None:
    """Return the pinned schema of a stage; None if there is none."""
    fix = "Delete it, and the next run infers the schema again"
    return store.read_record((pipeline, stage, SCHEMAS), f"{definition}.json", _CODEC.load, fix)


def latest_pin(store: Store, pipeline: str, stage: str) -> SchemaPin | None:
    """Return the schema of a stage that was pinned last, by any definition; None if none was.

    If stored rows have the columns of one, it is the last of those.
    """
    folders = [layer.root.child(pipeline, stage, SCHEMAS) for layer in store.layers]
    definitions = {name.removesuffix(".json") for folder in folders for name in folder.names()}
    pins = [read_pin(store, pipeline, stage, each) for each in definitions]
    known = sorted(filter(None, pins), key=lambda pin: pin.pinned_at)
    for folder, name in [*store.latest_of_all(pipeline, stage).items()][-1:]:
        stored = {*store.opened(pipeline, stage, folder, str(name)).schema}
        known = [pin for pin in known if stored.issuperset(pin.schema)] or known
    return known[-1] if known else None


def keep_pin(store: Store, pipeline: str, stage: str, definition: str, pin: SchemaPin) -> SchemaPin:
    """Pin a schema, unless another run has pinned one meanwhile."""
    folder, name = store.root.child(pipeline, stage, SCHEMAS), f"{definition}.json"
    folder.create(name, _CODEC.dumps(pin))
    return read_pin(store, pipeline, stage, definition) or pin
