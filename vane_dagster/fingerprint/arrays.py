"""Digests of arrays, tables, frames and tensors, by their content and type, not by their layout.

A library that is not loaded can't be the type of a value, so none is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from vane_dagster.fingerprint.hashing import combine


class ArrayEncoder:
    """Hashes values of numpy, pyarrow, pandas and torch; what they hold goes to `digest`."""

    def __init__(self, digest: Callable[[Any, str], str]) -> None:
        self._digest = digest

    def encode(self, value: Any, path: str) -> str | None:
        """Hashes a value of one of the libraries; None for any other.

        A subclass that a user or another library defines is none of theirs: it may hold more.
        """
        root = type(value).__module__.partition(".")[0]
        step = {
            "numpy": self._numpy,
            "pyarrow": self._pyarrow,
            "pandas": self._pandas,
            "torch": self._torch,
        }.get(root)
        library = sys.modules.get(root)
        return None if step is None or library is None else step(library, value, path)

    def _each(self, values: Iterable[Any], path: str) -> list[str]:
        return [self._digest(item, f"{path}[{index}]") for index, item in enumerate(values)]

    def _texts(self, values: Iterable[Any], path: str) -> list[str]:
        """Digests of the different texts among the values, which may name files."""
        return self._each(sorted({item for item in values if type(item) is str}), path)

    def _numpy(self, np: Any, value: Any, path: str) -> str | None:
        kind = type(value)
        if isinstance(value, np.dtype):
            return self._dtype(np, value, path)
        if isinstance(value, np.str_):
            return combine("scalar", "str", self._digest(str(value), path))
        if isinstance(value, np.generic):
            content = self._buffer(np, np.asarray(value), path)
            return combine("scalar", self._dtype(np, value.dtype, path), content)
        if isinstance(value, np.ma.MaskedArray) and kind.__name__ == "MaskedArray":
            plain = (value.data, np.ma.getmaskarray(value), value.fill_value, bool(value.hardmask))
            return combine("masked", *self._each(plain, path))
        if kind.__name__ in ("ndarray", "memmap", "matrix", "recarray", "chararray"):
            same = "array" if kind.__name__ in ("ndarray", "memmap") else kind.__name__
            plain = value.view(np.ndarray)
            head = (self._dtype(np, value.dtype, path), repr(value.shape))
            return combine(same, *head, self._buffer(np, plain, path))
        return combine("ufunc", value.__name__) if isinstance(value, np.ufunc) else None

    def _dtype(self, np: Any, dtype: Any, path: str) -> str:
        if dtype.names is not None:
            fields = [
                combine(name, repr(field[1:]), self._dtype(np, field[0], path))
                for name, field in ((name, dtype.fields[name]) for name in dtype.names)
            ]
            return combine("dtype", str(dtype.itemsize), str(dtype.isalignedstruct), *fields)
        if dtype.subdtype is not None:
            base, shape = dtype.subdtype
            return combine("dtype", "of", self._dtype(np, base, path), repr(shape))
        return combine("dtype", dtype.str, repr(dtype) if dtype.kind == "T" else "")

    def _buffer(self, np: Any, value: Any, path: str) -> str:
        """Hashes an array's elements; what lies between them in memory does not count."""
        dtype = value.dtype
        if dtype.names is not None:
            return combine("fields", *(self._buffer(np, value[n], path) for n in dtype.names))
        if dtype.hasobject or dtype.kind == "T":
            return combine("objects", *self._each(value.ravel().tolist(), path))
        if dtype.char in "gG":  # some bytes of a long double are no part of the number
            return combine("long", *map(np.format_float_scientific, value.ravel().view("g")))
        content = np.ascontiguousarray(value).tobytes()
        if dtype.kind != "U":
            return combine("bytes", content)
        return combine("texts", content, *self._texts(value.ravel().tolist(), path))

    def _pyarrow(self, pa: Any, value: Any, path: str) -> str | None:
        if isinstance(value, pa.Schema):
            return combine("schema", value.serialize().to_pybytes())
        if isinstance(value, pa.Field):
            return combine("field", pa.schema([value]).serialize().to_pybytes())
        if isinstance(value, pa.DataType):
            return combine("type", pa.schema([("", value)]).serialize().to_pybytes())
        if isinstance(value, (pa.Table, pa.RecordBatch)):
            columns = [self._pyarrow(pa, column, path) or "" for column in value.columns]
            return combine("table", self._pyarrow(pa, value.schema, path) or "", *columns)
        if isinstance(value, pa.Scalar):
            kind = self._pyarrow(pa, value.type, path) or ""
            return combine("scalar", kind, self._elements(pa, pa.array([value], value.type), path))
        if not isinstance(value, (pa.Array, pa.ChunkedArray)):
            return None
        kind = self._pyarrow(pa, value.type, path) or ""
        return combine("array", kind, self._elements(pa, value, path))

    def _elements(self, pa: Any, value: Any, path: str) -> str:
        """Hashes a column's elements, whatever chunks they are in."""
        kind = value.type
        if isinstance(value, pa.ChunkedArray):
            if pa.types.is_dictionary(kind):
                value = value.unify_dictionaries()
            if value.num_chunks != 1:
                value = value.combine_chunks()
            if isinstance(value, pa.ChunkedArray):  # none, or as one was
                chunks = value.chunks or [pa.array([], kind)]
                if len(chunks) > 1:
                    return combine("chunks", *(self._elements(pa, one, path) for one in chunks))
                value = chunks[0]
        if isinstance(value, pa.ExtensionArray):
            return combine("extension", self._elements(pa, value.storage, path))
        if pa.types.is_dictionary(kind):
            parts = (value.indices, value.dictionary)
            return combine("dictionary", *(self._elements(pa, part, path) for part in parts))
        flat = pa.types.is_primitive(kind) or pa.types.is_string(kind)
        if value.null_count or not flat:
            # What lies under a null is arbitrary memory, so only the values count.
            return combine("values", *self._each(value.to_pylist(), path))
        # Bits before and behind a slice are no part of it.
        column = pa.table([pa.concat_arrays([value])], names=[""])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, column.schema) as writer:
            writer.write_table(column)
        texts = self._texts(value.unique().to_pylist(), path) if pa.types.is_string(kind) else []
        return combine("stream", sink.getvalue().to_pybytes(), *texts)

    def _pandas(self, pd: Any, value: Any, path: str) -> str | None:
        if value is pd.NA or value is pd.NaT:
            return combine("pandas", repr(value))
        if isinstance(value, (pd.Timestamp, pd.Timedelta)):
            zone = str(getattr(value, "tz", None))
            return combine(type(value).__name__, str(value.value), str(value), zone)
        if isinstance(value, pd.Interval):
            return combine("interval", value.closed, *self._each((value.left, value.right), path))
        if isinstance(value, pd.Period):
            return combine("period", value.freqstr, str(value.ordinal))
        if isinstance(value, pd.api.extensions.ExtensionDtype):
            return self._pandas_dtype(pd, value, path)
        if isinstance(value, pd.api.extensions.ExtensionArray):
            return combine("extension", self._digest(pd.Series(value), path))
        if isinstance(value, pd.DataFrame):
            columns = [self._digest(value.iloc[:, at], path) for at in range(value.shape[1])]
            names = self._digest(value.columns, f"{path}.columns")
            index = self._digest(value.index, f"{path}.index")
            return combine("frame", names, index, self._attrs(value, path), *columns)
        if isinstance(value, pd.MultiIndex):
            levels = [self._digest(level, f"{path}.levels") for level in value.levels]
            codes = [self._digest(list(map(int, code)), f"{path}.codes") for code in value.codes]
            return combine("levels", self._digest(list(value.names), path), *levels, *codes)
        if isinstance(value, pd.Index):
            head = (self._digest(value.name, f"{path}.name"), type(value).__name__)
            frequency = str(getattr(value, "freqstr", None))
            return combine("index", *head, frequency, self._column(pd, value, path))
        if isinstance(value, pd.Series):
            head = (self._digest(value.name, f"{path}.name"), self._attrs(value, path))
            index = self._digest(value.index, f"{path}.index")
            return combine("series", *head, index, self._column(pd, value, path))
        return None

    def _attrs(self, value: Any, path: str) -> str:
        allowed = str(value.flags.allows_duplicate_labels)
        return combine("attrs", self._digest(value.attrs, f"{path}.attrs"), allowed)

    def _column(self, pd: Any, value: Any, path: str) -> str:
        kind = self._pandas_dtype(pd, value.dtype, path)
        return combine("column", kind, *self._each(value.tolist(), path))

    def _pandas_dtype(self, pd: Any, dtype: Any, path: str) -> str:
        if isinstance(dtype, pd.CategoricalDtype):
            categories = self._digest(dtype.categories, f"{path}.categories")
            return combine("categories", categories, str(dtype.ordered))
        return combine("dtype", repr(dtype))

    def _torch(self, torch: Any, value: Any, path: str) -> str | None:
        if isinstance(value, (torch.dtype, torch.device)):
            return combine("torch", str(value))
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.is_meta:
            return None
        head = (
            type(value).__name__,
            str(value.dtype),
            repr(tuple(value.shape)),
            str(value.requires_grad),
            value.device.type,
        )
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return combine("tensor", *head, plain.view(torch.uint8).numpy().tobytes())
