"""Spark's types as users write them: DDL strings and objects of `pyspark.sql.types`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from vane_dagster.errors import SchemaError
from vane_dagster.types.schema import check_distinct

_PLAIN: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_NAMES = (*_PLAIN, "decimal(p,s)", "varchar(n)", "time", "array<...>", "map<...>", "struct<...>")
_TOKEN = re.compile(r"""`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|\S""", re.DOTALL)
_ARGUMENTS = {
    "char": 1,
    "character": 1,
    "varchar": 1,
    "time": 1,
    "decimal": 2,
    "dec": 2,
    "numeric": 2,
}
"""Types with numbers in parentheses, each with the most of them."""


def parse_return_type(return_type: object, where: str) -> pa.DataType:
    """Convert the `return_type` of a Spark UDF to an Arrow type, as Spark converts it."""
    if isinstance(return_type, str):
        return _Parser(return_type, where).parse()
    if isinstance(return_type, pa.DataType):
        return return_type
    described = getattr(return_type, "jsonValue", None)
    if isinstance(return_type, type) and described is not None:
        name = return_type.__name__
        raise SchemaError(f"{where}: return_type is the class {name}; write {name}()")
    if described is None:
        raise SchemaError(
            f"{where}: return_type is a {type(return_type).__name__}; expected a DDL string, as "
            "'array<float>' or 'label string, score double', or a pyspark.sql.types.DataType"
        )
    return _from_json(described(), where)


def _from_json(described: Any, where: str) -> pa.DataType:
    if isinstance(described, str):
        return _Parser(described, where).parse(columns=False)
    kind = described.get("type") if isinstance(described, Mapping) else None
    if kind == "array":
        return pa.list_(_from_json(described["elementType"], where))
    if kind == "map":
        key = _from_json(described["keyType"], where)
        return pa.map_(key, _from_json(described["valueType"], where))
    if kind == "struct":
        fields = [(f["name"], _from_json(f["type"], where)) for f in described["fields"]]
        return _struct(fields, where)
    raise SchemaError(
        f"{where}: return_type has the user-defined type {described!r}, which Arrow cannot hold; "
        "return its values as an array<double>"
    )


def _struct(fields: list[tuple[str, pa.DataType]], where: str) -> pa.DataType:
    if not fields:
        raise SchemaError(f"{where}: return_type is a struct without fields; name each field")
    check_distinct([name for name, _ in fields], where)
    return pa.struct(fields)


class _Parser:
    """A recursive descent over the tokens of a DDL string."""

    def __init__(self, ddl: str, where: str) -> None:
        self.ddl, self.where = ddl, where
        self.tokens: list[str] = [*_TOKEN.findall(ddl), ""]
        self.at = 0

    def parse(self, columns: bool = True) -> pa.DataType:
        """Parse a type, or a list of columns, which is a struct."""
        second = self.tokens[1:2] or [""]
        is_list = second[0] == ":" or (
            re.match(r"[`\w]", second[0]) and second[0].lower() not in ("not", "comment", "collate")
        )
        is_list = columns and (is_list or self.tokens[0][:1] == "`")
        kind = _struct(self.fields(), self.where) if is_list else self.kind()
        if self.tokens[self.at]:
            raise self.unexpected("the end, or a comma between columns")
        return kind

    def kind(self) -> pa.DataType:
        name = self.next().lower()
        if name in _PLAIN:
            kind = _PLAIN[name]
        elif name in _ARGUMENTS:
            kind = self.with_numbers(name)
        elif name == "array":
            self.expect("<")
            kind = pa.list_(self.kind())
            self.expect(">")
        elif name == "map":
            self.expect("<")
            key = self.kind()
            self.expect(",")
            kind = pa.map_(key, self.kind())
            self.expect(">")
        elif name == "struct":
            self.expect("<")
            kind = _struct([] if self.tokens[self.at] == ">" else self.fields(), self.where)
            self.expect(">")
        else:
            self.at -= 1
            raise self.unexpected(f"one of the types {', '.join(_NAMES)}")
        # A collation changes comparisons alone.
        if kind == pa.string() and self.accept("collate") and not self.next():
            self.at -= 1
            raise self.unexpected("the name of a collation")
        return kind

    def fields(self) -> list[tuple[str, pa.DataType]]:
        fields = [self.field()]
        while self.accept(","):
            fields.append(self.field())
        return fields

    def field(self) -> tuple[str, pa.DataType]:
        text = self.next()
        name = text[1:-1].replace("``", "`") if text[:1] == "`" else text
        if not name or not re.match(r"[`\w]", text):
            self.at -= 1
            raise self.unexpected("the name of a field")
        self.accept(":")
        kind = self.kind()
        if self.accept("not"):
            self.expect("null")
        if self.accept("comment") and self.next()[:1] not in ("'", '"'):
            self.at -= 1
            raise self.unexpected("a quoted comment")
        return name, kind

    def with_numbers(self, name: str) -> pa.DataType:
        """Parse the numbers of a type such as ``decimal(10,2)``."""
        found: list[int] = []
        if self.accept("("):
            while not found or self.accept(","):
                if not self.tokens[self.at].isdecimal():
                    raise self.unexpected("a number")
                found.append(int(self.next()))
            self.expect(")")
        is_text = name in ("char", "character", "varchar")
        precision, scale, *_ = (*found, *(10, 0)[len(found) :])
        if len(found) > _ARGUMENTS[name] or (is_text and not found):
            raise self.unexpected(f"{name} with another number of arguments")
        if name == "time" or is_text:
            return pa.time64("us") if name == "time" else pa.string()
        if not 1 <= precision <= 38 or scale > precision:
            raise self.unexpected("a decimal of 1 to 38 digits, not fewer than follow the point")
        return pa.decimal128(precision, scale)

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, text: str) -> bool:
        is_next = self.tokens[self.at].lower() == text
        self.at += is_next
        return is_next

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.unexpected(repr(text))

    def unexpected(self, expected: str) -> SchemaError:
        rest = " ".join(self.tokens[self.at :]).strip()
        return SchemaError(
            f"{self.where}: return_type {self.ddl!r}: expected {expected}, at "
            f"{repr(rest) if rest else 'the end'}"
        )
