"""Row records: the row keys of a part's input rows, with the outcome and the origin of each row.

A file beside each part has one record for each input row, in the order of the input. A later run
looks rows up in these records, and copies the outcomes of those with known keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import pyarrow as pa

from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.part_file import write_beside

SUFFIX = ".rows.parquet"
KEY_HIGH, KEY_LOW, ID, OUTCOME, EPOCH = "key_high", "key_low", "id", "outcome", "epoch"
RUN_ID, MODEL, CODE, AT = "run_id", "model", "code", "at"
ORIGIN = (EPOCH, RUN_ID, MODEL, CODE, AT)
"""The columns that say where the output of a row was computed, also if it was copied since."""
_TEXT = pa.dictionary(pa.int32(), pa.string())


class Outcome(IntEnum):
    """What became of an input row. The numbers are in every store and must not change."""

    OUTPUT = 0
    """It has output rows in the part."""
    FILTERED = 1
    """It has none, as the stage declares."""
    FAILED = 2
    """It failed, and would fail again."""
    PASSING = 3
    """It failed for a reason that may pass, or could not be read: never found again."""


@dataclass(frozen=True)
class RecordedPart:
    """A part with row records.

    Attributes:
        folder: The folder of both.
        part: The part's file name.
        records: The file name of the row records.
        faults: The file name of the records of failed rows; empty without any.
        rows: The number of input rows.
    """

    folder: StoragePath
    part: str
    records: str
    faults: str = ""
    rows: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(filter(None, (self.part, self.records, self.faults)))

    @classmethod
    def of(cls, folder: StoragePath, part: PartInfo) -> RecordedPart:
        """Describe a part of a folder."""
        return cls(folder, part.name, part.row_records, part.faults, part.rows_in)


def computed_by(definition: str, row_definition: str) -> str:
    """Return the CODE of rows: the stage's definition, and its row definition."""
    return f"{definition}-{row_definition}"


def parse_code(code: str) -> tuple[str, str]:
    """Return both; the latter is empty in records of earlier releases."""
    definition, _, row_definition = code.partition("-")
    return definition, row_definition


def records_schema(id_type: pa.DataType) -> pa.Schema:
    """Return the schema of row records."""
    return pa.schema(
        [
            pa.field(KEY_HIGH, pa.uint64(), nullable=False),
            pa.field(KEY_LOW, pa.uint64(), nullable=False),
            (ID, id_type),
            (OUTCOME, pa.uint8()),
            (EPOCH, pa.uint32()),
            (RUN_ID, _TEXT),
            (MODEL, _TEXT),
            (CODE, _TEXT),
            (AT, pa.timestamp("us", "UTC")),
        ]
    )


def write_records(folder: StoragePath, key: str, records: pa.Table) -> str:
    """Write the row records of a fragment beside its part."""
    # Columns without nulls are written in half the time.
    fields = zip(records.schema, records.columns)
    kept = pa.schema([f.with_nullable(f.name == ID or c.null_count > 0) for f, c in fields])
    records = pa.Table.from_arrays(records.columns, schema=kept)
    # Keys are as random bits.
    codecs = {n: "none" if n in (KEY_HIGH, KEY_LOW) else "zstd" for n in records.column_names}
    return write_beside(
        folder,
        key,
        SUFFIX,
        records,
        ID,
        compression=codecs,
        use_dictionary=[RUN_ID, MODEL, CODE],
        write_statistics=False,
    )
