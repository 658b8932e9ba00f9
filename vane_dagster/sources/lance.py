"""`LanceSource`: the rows of a Lance table at a version."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster import _failpoints
from vane_dagster._arguments import (
    PLACEHOLDER,
    check_placeholders,
    checked_url,
    fill_placeholders,
    filled_filter,
    list_of_names,
)
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._secrets import url_parts, with_options
from vane_dagster.errors import DefinitionError, SourceError, names
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    cleaned_up,
    fragment_record,
    is_gone,
    unreadable,
)
from vane_dagster.sources.file_source import asset_path, key_in_path
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import IO_THREADS, Location, absolute_url
from vane_dagster.storage.lance_table import open_table, require_lance
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.table_options import check_table_url
from vane_dagster.storage.transient_errors import with_retries

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

_KEPT_TABLES = 16
_BLOBS = "all_binary"
"""Lance's name for reading blobs as their bytes, and not as descriptions of them."""
_opened: dict[tuple[str, str, int | None], Any] = {}


@dataclass(frozen=True)
class RowsDetail:
    """What is needed to read rows of a table's fragment, as the `detail` of their span.

    Attributes:
        table: URL of the table.
        version: The version in which the rows were planned.
        fragment: Id of the fragment in that version.
        state: Digest of the fragment's data files and deletion file.
        filter: The SQL filter; None if all live rows of the fragment are rows of the partition.
    """

    table: str
    version: int
    fragment: int
    state: str
    filter: str | None = None

    def dumps(self) -> str:
        """Convert to JSON."""
        return json.dumps({n: v for n, v in vars(self).items() if v is not None})


@dataclass(frozen=True)
class LanceReader(SourceReader):
    """Reads rows of the fragments of Lance tables.

    Attributes:
        storage_options: Options of the fsspec file system; never part of a key.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.storage_options

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read live rows that pass the filter; blobs are read as their bytes."""
        read = [self._read_span(span, schema, context.location) for span in fragment.spans]
        return pa.concat_tables(read)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a fragment, whose files never change once they are written."""
        place = Location(file.url, self.storage_options)
        place.fs.invalidate_cache()
        if not place.fs.exists(place.path):
            raise FileNotFoundError(file.url)
        return file

    def _read_span(self, span: FileSpan, schema: pa.Schema, location: str) -> pa.Table:
        def read() -> pa.Table:
            table, fragment, where = self._find(span, location)
            found = table.scanner(
                columns=schema.names,
                fragments=[fragment],
                filter=where,
                offset=span.start,
                limit=span.stop - span.start,
                scan_in_order=True,
                blob_handling=_BLOBS,
            ).to_table()
            return found.select(schema.names).cast(schema)

        try:
            return with_retries(_failpoints.failing("read", span.url, read))
        except SourceError:
            raise
        except Exception as error:  # the driver raises plain exceptions
            if span.detail and is_gone(span.url, self.storage_options):
                detail = RowsDetail(**json.loads(span.detail))
                version = f"version {detail.version} of Lance table {detail.table!r}"
                raise cleaned_up(span.url, version, "cleanup_old_versions", location) from error
            raise unreadable(span.url, error, location) from error

    def _find(self, span: FileSpan, location: str) -> tuple[Any, Any, str | None]:
        """Return the table and fragment of a span, and its filter.

        If the planned version was cleaned up, the fragment is looked for in the latest one.
        """
        if span.detail:
            detail = RowsDetail(**json.loads(span.detail))
            place = Location(detail.table, self.storage_options)
            for is_new in (False, True):  # a table may have been written anew, from version 1
                table = _table(place, detail.version, is_new)
                fragment = None if table is None else table.get_fragment(detail.fragment)
                if fragment is not None and _state(fragment.metadata) == detail.state:
                    return table, fragment, detail.filter
            url, state, where = detail.table, detail.state, detail.filter
        else:
            url, state, where = span.url.rpartition("/data/")[0], None, None
        table = open_table(Location(url, self.storage_options))
        for fragment in table.get_fragments() if table is not None else ():
            metadata = fragment.metadata
            same = state in (None, _state(metadata)) and _data_url(table, url, metadata) == span.url
            if same:
                return table, fragment, where
        number = "the planned version" if not span.detail else f"version {detail.version}"
        raise SourceError(
            f"{location}: {number} of Lance table {url!r} is gone, and its latest version does not "
            "have these rows unchanged; cleanup_old_versions deletes former versions. Run the "
            "partition again, which reads the latest version. If the source names a version, name "
            "one that the table still has"
        )


@dataclass(frozen=True)
class LanceSource(LanceReader, Source):
    """The rows of a Lance table, at one version or at the latest one of each run.

    A unit is a fragment with its deletions, so a commit that adds fragments computes only those.

    Attributes:
        url: A local path or ``s3://`` URL, with placeholders for the partition's key.
        table_version: A version's number, or a tag; None for the latest version.
        filter: An SQL filter, with placeholders for the partition's key.
        columns: The columns to read; None for all.
        asset: Key of the Dagster asset that writes the table, as "a/b", if there is one.
        allow_empty: Whether a partition without rows is accepted.
        planned: The tables as the run plans them, once the source is bound to a store.
    """

    kind: ClassVar[str] = "lance"
    url: str = ""
    table_version: int | str | None = None
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    asset: str | None = None
    allow_empty: bool = False
    planned: _PlannedTables | None = field(default=None, init=False, repr=False, compare=False)

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        fields = PLACEHOLDER.findall(f"{self.url} {self.filter or ''}")
        if partitions_def is not None and not fields:
            raise DefinitionError(
                f"{location}: vd.lance({self.url!r}) has {{partition_key}} neither in the URL nor "
                "in the filter, so that every partition would have the same rows; give it one, as "
                "filter=\"day = '{partition_key}'\", or leave partitions_def out"
            )
        for text in (self.url, self.filter or ""):
            if PLACEHOLDER.search(text):
                check_placeholders(location, text, partitions_def)

    def describe(self) -> str:
        return f"Lance table {self.place}"

    @property
    def place(self) -> str:
        return self.url

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def url_for(self, partition_key: str | None) -> str:
        """Return the URL of a partition's table."""
        return fill_placeholders(self.url, partition_key)

    def schema(self, location: str) -> pa.Schema:
        """Return the columns of the table; of the last one if the URL has placeholders."""
        url = self.url
        if PLACEHOLDER.search(url):
            place = Location(PLACEHOLDER.sub("*", url), self.storage_options)
            found = sorted(place.fs.glob(place.path))
            if not found:
                raise SourceError(f"{location}: no Lance table at {place.url!r}")
            url = place.fs.unstrip_protocol(found[-1])
        return _PlannedTable(self, url, location).schema

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "planned", _PlannedTables(bound, "the source"))
        return bound

    def for_workers(self) -> SourceReader:
        return LanceReader(self.storage_options)

    @property
    def splitting(self) -> str:
        return "live rows of a fragment, 1"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the fragments of the table that have rows of each partition.

        A filter is evaluated for each partition, which reads the columns that it uses.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.
        """
        planned = self.planned or _PlannedTables(self, location)

        def listed(key: str | None) -> Listed:
            try:
                return tuple(unit.record for unit in planned.units(key))
            except SourceError as error:
                return error

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            return dict(zip(partitions, threads.map(listed, partitions)))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        where = "" if self.filter is None else f" where {filled_filter(self.filter, partition)}"
        return SourceError(
            f"{location}: Lance table {self.url_for(partition)!r} has no rows{where}. Write them "
            "first, check the filter, or accept it with vd.lance(..., allow_empty=True)"
        )

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        planned = self.planned or _PlannedTables(self, location)
        units = {(u.record.url, u.record.version): u for u in planned.units(partition)}
        if gone := [file.url for file in files if (file.url, file.version) not in units]:
            raise SourceError(
                f"{location}: table {self.url_for(partition)!r} was changed while the run was "
                f"planned, so that {names(gone)} is no longer in it. Run the partition again"
            )
        table = planned.table(partition)

        def fragments(file: FileRecord) -> list[FragmentRecord]:
            return list(table.cut(units[file.url, file.version], rule))

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            found = itertools.chain.from_iterable(threads.map(fragments, files))
            return SourceTable(table.schema, tuple(found))


@dataclass(frozen=True)
class _Unit:
    """A fragment of a table, with rows of a partition.

    Attributes:
        record: Its file record.
        rows: The number of these rows.
        detail: What is needed to read them.
    """

    record: FileRecord
    rows: int
    detail: RowsDetail


class _PlannedTables:
    """The tables of a source, one for each URL, and the rows of each partition.

    Args:
        source: The source.
        location: The pipeline, for messages.
    """

    def __init__(self, source: LanceSource, location: str) -> None:
        self._source, self._location = source, location
        self._tables: dict[str, _PlannedTable] = {}
        self._units: dict[str | None, tuple[_Unit, ...]] = {}

    def table(self, partition: str | None) -> _PlannedTable:
        """Return the table of a partition.

        Raises:
            SourceError: If the key cannot be in a URL.
        """
        try:
            url = fill_placeholders(self._source.url, partition, key_in_path)
        except SourceError as error:
            raise SourceError(f"{self._location}: {error}") from None
        return self._tables.setdefault(url, _PlannedTable(self._source, url, self._location))

    def units(self, partition: str | None) -> tuple[_Unit, ...]:
        """Return the fragments with rows of a partition, in the table's order.

        Args:
            partition: The partition's key.

        Raises:
            SourceError: If there is no such table or version, or the filter fails.
        """
        if partition not in self._units:
            where = filled_filter(self._source.filter, partition)
            self._units[partition] = self.table(partition).units(where)
        return self._units[partition]


class _PlannedTable:
    """A table at one version, opened on first use, so that one plan sees one version.

    Args:
        source: The source.
        url: The table.
        location: The pipeline, for messages.
    """

    def __init__(self, source: LanceSource, url: str, location: str) -> None:
        self._source, self._url, self._location = source, url, location
        self._place = Location(url, source.storage_options)

    @functools.cached_property
    def _table(self) -> Any:
        wanted = self._source.table_version
        try:
            found = with_retries(lambda: open_table(self._place, wanted))
        except Exception as error:  # the driver raises plain exceptions
            raise unreadable(self._url, error, self._location) from error
        if found is None and wanted is not None and (latest := open_table(self._place)) is not None:
            known = [*latest.tags.list(), *(str(each["version"]) for each in latest.versions())]
            raise SourceError(
                f"{self._location}: Lance table {self._url!r} has no version {wanted!r}; it has "
                f"{names(known)}. Versions that were cleaned up are gone"
            )
        if found is None:
            raise SourceError(
                f"{self._location}: no Lance table at {self._url!r}. Check the path, or write the "
                "table first"
            )
        return found

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns and the types in which they are read."""
        table, columns = self._table, self._source.columns
        owner = f"{self._location}: Lance table {self._url!r}"
        require_columns(owner, columns or (), table.schema.names, SourceError)
        wanted = None if columns is None else list(columns)
        return plain_schema(table.scanner(columns=wanted, blob_handling=_BLOBS).projected_schema)

    @functools.cached_property
    def _columns(self) -> Mapping[str, Any]:
        """The table's columns by name, each as a field of Lance, whose id no other one ever has."""
        return {field.name(): field for field in self._table.lance_schema.fields()}

    @functools.cached_property
    def _field_ids(self) -> set[int]:
        """The ids of the columns to read, and of the fields in them."""
        return self._ids_of(self.schema.names)

    def _ids_of(self, columns: Iterable[str]) -> set[int]:
        """Return the ids of columns, and of the fields in them."""
        pending = [self._columns[name] for name in columns if name in self._columns]
        found = set()
        while pending:
            each = pending.pop()
            found.add(each.id())
            pending += each.children()
        return found

    def units(self, where: str | None) -> tuple[_Unit, ...]:
        """Return the fragments with rows that pass a filter.

        Args:
            where: The filter; None for all rows.

        Raises:
            SourceError: If the filter fails.
        """
        table = self._table
        fragments = {f.fragment_id: f.metadata for f in table.get_fragments()}
        if where is None:
            counts = Counter({id: metadata.num_rows for id, metadata in fragments.items()})
        else:
            counts = self._passing(where)
        # Names in other texts than names of columns do no harm: they add to what rows depend on.
        tested = [name for name in self._columns if where and name.lower() in where.lower()]
        columns = [[each.name, str(each.type), *self._id_of(each.name)] for each in self.schema]
        tests = where and [where, *([name, *self._id_of(name)] for name in tested)]
        fields = self._field_ids | self._ids_of(tested)
        found = []
        for id, metadata in fragments.items():
            if not counts[id]:
                continue
            version = _digest([_state(metadata, fields), columns, tests])
            size = self._stored_bytes(metadata)
            record = FileRecord(_data_url(table, self._url, metadata), size, version)
            detail = RowsDetail(self._url, table.version, id, _state(metadata), where)
            found.append(_Unit(record, counts[id], detail))
        return tuple(found)

    def _id_of(self, column: str) -> list[int]:
        """Return the id of a column, which a name may not have had before; none for `_rowid`."""
        return [self._columns[column].id()] if column in self._columns else []

    def _passing(self, where: str) -> Counter[int]:
        """Return the number of rows that pass a filter, by the fragment's id."""
        scanner = self._table.scanner(columns=[], filter=where, with_row_address=True)
        found: Counter[int] = Counter()
        try:
            for batch in scanner.to_batches():
                fragments = pc.shift_right(batch.column("_rowaddr"), pa.scalar(32, pa.uint64()))
                for each in pc.value_counts(fragments):
                    found[each["values"].as_py()] += each["counts"].as_py()
        except Exception as error:  # the driver raises plain exceptions
            fix = f"Check the filter, which is {where!r}"
            raise unreadable(self._url, error, self._location, fix) from error
        return found

    def cut(self, unit: _Unit, rule: FragmentRule) -> Iterator[FragmentRecord]:
        """Cut the rows of a fragment evenly.

        Args:
            unit: The fragment.
            rule: The maximum size of a fragment.
        """
        size = self._bytes(unit)
        pieces = max(-(-unit.rows // rule.rows), min(unit.rows, -(-size // rule.bytes)))
        edges = [unit.rows * i // pieces for i in range(pieces + 1)]
        for start, stop in itertools.pairwise(edges):
            spans = [(unit.record, start, stop)]
            yield fragment_record(spans, size // pieces, details=[unit.detail.dumps()])

    def _bytes(self, unit: _Unit) -> int:
        """Estimate the bytes of a unit's rows in memory."""
        fragment = self._table.get_fragment(unit.detail.fragment)
        metadata = fragment.metadata
        stored = self._stored_bytes(metadata)
        share = unit.rows / max(1, metadata.physical_rows)
        width = sum(_width(each.type) for each in self.schema)
        return max(int(stored * share), width * unit.rows + self._blob_bytes(fragment, unit))

    def _stored_bytes(self, metadata: Any) -> int:
        """Return the size of the data files of a fragment that have columns to read."""
        files = [each for each in metadata.files if self._field_ids.intersection(each.fields)]
        return sum(each.file_size_bytes or 0 for each in files)

    def _blob_bytes(self, fragment: Any, unit: _Unit) -> int:
        """Return the bytes of blobs, which may be in files beside the fragment's."""
        table = self._table
        plain = table.scanner(columns=self.schema.names).projected_schema
        blobs = [
            each.name
            for each in plain
            if pa.types.is_struct(each.type) and not pa.types.is_struct(self._type(each.name))
        ]
        if not blobs:
            return 0
        described = table.scanner(columns=blobs, fragments=[fragment], filter=unit.detail.filter)
        return sum(
            pc.sum(pc.struct_field(batch.column(name), "size")).as_py() or 0
            for batch in described.to_batches()
            for name in blobs
        )

    def _type(self, column: str) -> pa.DataType:
        return self.schema.field(column).type


@known_keywords("vd.lance")
def lance(
    url: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LanceSource:
    """Declare a Lance table as a pipeline's source. It requires ``vane-dagster[lance]``.

    Deleted rows are left out. Blobs are read as their bytes.

    Args:
        url: The table, a local path or ``s3://``. ``{partition_key}`` is replaced by the
            partition's key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition.
        version: The number of a version, or a tag. By default each run reads the version that is
            the latest when it is planned, and computes only the fragments that are new or changed.
        filter: An SQL filter that Lance evaluates, as ``"day = '{partition_key}'"``. The rows of a
            partition are those that pass it. A partitioned pipeline needs the key here, or in the
            URL.
        columns: The columns to read; all by default. A change of other columns computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.
        storage_options: Options of the fsspec file system. For S3, the options that Lance's own
            driver supports are passed to it: ``key``, ``secret``, ``token``, ``anon``,
            ``endpoint_url``, and ``endpoint_url`` and ``region_name`` of ``client_kwargs``.

    Raises:
        DefinitionError: If an argument has another form, or pylance is not installed.
    """
    where = "vd.lance"
    require_lance(where)
    url, found = url_parts(absolute_url(checked_url(where, url)))
    check_table_url(where, url, "Lance")
    if type(version) not in (int, str, type(None)):
        raise DefinitionError(
            f"{where}: version is {version!r}; expected the number of a version, or a tag"
        )
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise DefinitionError(
            f'{where}: filter is {filter!r}; expected an SQL filter as text, as "n > 3"'
        )
    return LanceSource(
        with_options(found, storage_options),
        url.rstrip("/"),
        version,
        filter,
        list_of_names(where, "columns", columns),
        asset_path(asset, where),
        allow_empty,
    )


def _table(place: Location, version: int, is_new: bool = False) -> Any:
    """Open a version of a table; the tables opened last are kept, as versions rarely change.

    Args:
        place: The table.
        version: The version.
        is_new: Whether to open it again.
    """
    key = (place.url, repr(sorted(place.storage_options.items(), key=str)), version)
    if is_new:
        _opened.pop(key, None)
    if key not in _opened:
        table = open_table(place, version)
        if table is None:
            return None
        _opened[key] = table
        while len(_opened) > _KEPT_TABLES:
            del _opened[next(iter(_opened))]
    return _opened[key]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _state(metadata: Any, fields: set[int] | None = None) -> str:
    """Return a digest of what the rows of a fragment follow from.

    Args:
        metadata: The `lance.FragmentMetadata`.
        fields: Ids of the fields that count; None for all.
    """
    files = [
        [str(each.path), list(each.fields), each.base_id]
        for each in metadata.files
        if fields is None or fields.intersection(each.fields)
    ]
    deletions = metadata.deletion_file
    return _digest([files, metadata.physical_rows, deletions and deletions.asdict()])


def _data_url(table: Any, url: str, metadata: Any) -> str:
    """Return the URL of a fragment's first data file."""
    file = metadata.files[0]
    folder = f"{url.rstrip('/')}/data"
    if file.base_id is not None:
        base = table.base_paths()[file.base_id]
        folder = f"{base.path.rstrip('/')}/data" if base.is_dataset_root else base.path.rstrip("/")
    return f"{folder}/{file.path}"


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a value of a fixed size; 0 for other types."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _width(kind.storage_type)
    return max(1, kind.bit_width // 8) if pa.types.is_primitive(kind) else 0
