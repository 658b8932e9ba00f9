"""`RayDatasetSource`: the rows of a Ray Dataset that a function returns."""

from __future__ import annotations

import functools
import importlib
import inspect
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa
from pyarrow.fs import FSSpecHandler, PyFileSystem

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.fingerprint.bundle import sent_by_value
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.dependencies import DependencyWalk
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.modules import Finder
from vane_dagster.fingerprint.objects import ObjectEncoder
from vane_dagster.sources.base import Connect, Source
from vane_dagster.sources.parquet import StoredParquet, read_footer, row_groups
from vane_dagster.sources.piece_writer import GROUP_ROWS
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.sources.stored_table_source import StoredTableSource
from vane_dagster.storage.dataframes import NEEDS_RAY, form_of_value
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import FileRecord
from vane_dagster.storage.stored_tables import MADE, ParquetRows, Piece, StoredTable, tables
from vane_dagster.types.callables import qualname, unwrapped
from vane_dagster.types.schema import check_column_names, merged_types

_LABEL = "vd.ray_dataset"
_PARAMETER = "partition_key"
_ATTEMPT_BYTES = 6


@dataclass(frozen=True, kw_only=True)
class RayDatasetSource(StoredTableSource):
    """The rows of a Ray Dataset that a function returns.

    Attributes:
        function: The function.
        code_version: Replaces the function's code in its identity.
    """

    kind: ClassVar[str] = "ray"
    partitioned_by: ClassVar[str] = f"a parameter {_PARAMETER} of the function"
    function: Callable[..., Any] = field(repr=False, compare=False)
    code_version: str | None = None
    connect: Connect = field(default=lambda room: False, repr=False, compare=False)

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the function, for messages."""
        argument = "" if partition_key is None else repr(partition_key)
        return f"the Ray Dataset of {_name(self.function)}({argument})"

    def with_cluster(self, connect: Connect) -> Source:
        return replace(self, connect=connect)

    def identity(self, partition: str | None) -> str:
        key = partition if self.is_partitioned else None
        if self.code_version is None:
            return digest(_LABEL, self._code.digest, key)[:40]
        # The pipeline tells functions of one name apart.
        return digest(_LABEL, self.pipeline, self.code_version, key, self._given)[:40]

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        """Execute the dataset on the cluster, which writes its rows into the store."""
        self.connect(True)  # Ray Data waits for a CPU, and idle warm workers may hold all
        ray: Any = importlib.import_module("ray")
        place = self.url_for(partition)
        if not ray.is_initialized():
            raise SourceError(
                f"{location}: {place} is made on a Ray cluster, but this process is not connected "
                "to one. Run the pipeline with compute=RayCompute(...), or connect first, with "
                "vd.LocalCluster().connect() or ray.init(...)"
            )
        data: Any = importlib.import_module("ray.data")
        name = f"{MADE}/{identity}-{secrets.token_hex(_ATTEMPT_BYTES)}"
        folder = tables(self.bound.root).child(name)
        fs = None if folder.is_local else PyFileSystem(FSSpecHandler(folder.fs))
        with _native_tensors(data), sent_by_value(ray.cloudpickle, self._code.modules):
            dataset = self.function(**({_PARAMETER: partition} if self.is_partitioned else {}))
            if form_of_value(dataset) != NEEDS_RAY:
                raise SourceError(
                    f"{location}: {_name(self.function)} returned a {type(dataset).__module__}."
                    f"{type(dataset).__qualname__}; expected a {NEEDS_RAY}"
                )
            # A dataset without rows writes no file.
            schema = getattr(dataset.schema(), "base_schema", None)
            dataset.write_parquet(folder.path, filesystem=fs, row_group_size=GROUP_ROWS)

        reader = StoredParquet(self.bound.root)
        files = [FileRecord(folder.file_url(n), size, n) for n, size in folder.names().items()]
        files.sort(key=lambda file: file.version)
        footers = in_threads(lambda file: read_footer(file, reader, location), files)
        where = f"{location}: {place}"
        own = [each for each, _ in footers]
        if not own and not isinstance(schema, pa.Schema):
            raise SourceError(f"{where} made no rows, and Ray knows none of its columns")
        schema = merged_types(map(plain_schema, own or [schema]), where)
        check_column_names(schema.names, where)
        pieces = []
        for file, (_, footer) in zip(files, footers):
            path, rows = f"{name}/{file.version}", footer.num_rows
            size = sum(size for _, size in row_groups(footer))
            pieces.append(Piece(path, rows, size, (ParquetRows(path, 0, rows),)))
        return StoredTable(schema, tuple(piece for piece in pieces if piece.rows))

    @functools.cached_property
    def _given(self) -> str:
        """A digest of the arguments of a partial, which a version does not replace."""
        unread = LocalFiles(read=False)
        encoder = ObjectEncoder(DependencyWalk(Finder(), None, unread), unread)
        given = [getattr(self.function, name, None) for name in ("args", "keywords")]
        return encoder.digest(given, "an argument")

    @functools.cached_property
    def _code(self) -> CodeIdentity:
        unread = LocalFiles(read=False) if self.code_version is not None else LocalFiles()
        return code_identity(self.function, version=self.code_version, files=unread)


@known_keywords("vd.ray_dataset")
def ray_dataset(
    fn: Callable[..., Any], *, version: str | None = None, allow_empty: bool = False
) -> RayDatasetSource:
    """Declare the rows of a Ray Dataset as a pipeline's source.

    The first run that needs the rows calls the function, and Ray Data writes the rows into the
    store. Later runs read them there, until the function's code or `version` changes. So a run with
    ``force`` computes the stages again, but not the dataset. If arguments of a partial name local
    files, a change of their content counts too. Other changes of the data are not detected: set
    another `version`.

    The first run needs a Ray cluster: the cluster of `RayCompute`, or a connection made before by
    ``ray.init`` or ``vd.LocalCluster().connect()``. Later runs read the rows without Ray. If the
    rows are made again, every fragment is computed. If two runs make the same rows at once, both
    use the rows that are complete first. Idle warm workers that hold all CPUs are ended. Modules of
    yours that the dataset's tasks import inside of a function must be installed on the cluster.

    Args:
        fn: A function that returns any `ray.data.Dataset`. For a partitioned pipeline, it has a
            parameter ``partition_key``, and is called for each partition.
        version: Replaces the function's code in the identity of the source: the rows are made again
            when the version changes, not when the code does. Arguments of a partial still count.
        allow_empty: Whether a dataset without rows is accepted; an error by default.

    Raises:
        DefinitionError: If it is not a function.
    """
    if not callable(fn):
        hint = " Give a function that returns it" if form_of_value(fn) == NEEDS_RAY else ""
        raise DefinitionError(
            f"{_LABEL}: fn is a {type(fn).__module__}.{type(fn).__qualname__}; expected a function "
            f"that returns a {NEEDS_RAY}.{hint}"
        )
    takes = _PARAMETER in inspect.signature(fn).parameters
    own = None if version is None else str(version)
    return RayDatasetSource(
        function=fn, code_version=own, is_partitioned=takes, allow_empty=allow_empty
    )


def _name(function: Any) -> str:
    return qualname(unwrapped(function))


@contextmanager
def _native_tensors(data: Any) -> Iterator[None]:
    """Let Ray Data write arrays as Arrow's own tensors, which keep their shapes in Parquet."""
    context = data.DataContext.get_current()
    before = context.arrow_fixed_shape_tensor_format
    context.arrow_fixed_shape_tensor_format = type(before).ARROW_NATIVE
    try:
        yield
    finally:
        context.arrow_fixed_shape_tensor_format = before
