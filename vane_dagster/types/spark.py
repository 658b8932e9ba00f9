"""Spark's types as users write them: DDL strings and objects of `pyspark.sql.types`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

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
_DECIMALS = ("decimal", "dec", "numeric")
_LENGTHS = ("char", "character", "varchar")
_NESTED = ("array", "map", "struct")
_NAMES = (*_PLAIN, *_DECIMALS, *_LENGTHS, "time", *_NESTED)
_WITHOUT_ARROW = {
    "void": "declare the type of the values that come out",
    "interval": "return the number of seconds as a double",
    "variant": "return JSON text as a string",
    "geometry": "return WKB as binary",
    "geography": "return WKB as binary",
}
_FOREIGN = {
    "str": "string",
    "text": "string",
    "bool": "boolean",
    "uint8": "smallint",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float16": "float",
    "float32": "float",
    "float64": "double",
    "list": "array",
    "bytes": "binary",
    "blob": "binary",
    "datetime": "timestamp",
}
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
    | (?P<quoted>`(?:[^`]|``)*`)
    | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<word>\w+)
    | (?P<mark>.)
    """,
    re.VERBOSE | re.DOTALL,
)


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
        return _Parser(described, where).parse_one()
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
        self.ddl = ddl
        self.where = where
        self.tokens: list[tuple[str, str, int]] = [
            (str(found.lastgroup), found.group(), found.start())
            for found in _TOKEN.finditer(ddl)
            if found.lastgroup != "space"
        ]
        self.tokens.append(("end", "", len(ddl)))
        self.at = 0

    def parse(self) -> pa.DataType:
        """Parse a type, or a list of columns, which is a struct."""
        is_type = self.tokens[0][0] == "end" or (
            self.tokens[0][0] == "word" and not self.names_a_column()
        )
        kind = self.parse_one() if is_type else _struct(self.fields(), self.where)
        self.end()
        return kind

    def names_a_column(self) -> bool:
        group, text, _ = self.tokens[1]
        return text == ":" or (
            group in ("word", "quoted") and text.lower() not in ("not", "comment", "collate")
        )

    def parse_one(self) -> pa.DataType:
        """Parse one type, without a list of columns."""
        kind = self.kind()
        self.end()
        return kind

    def kind(self) -> pa.DataType:
        group, text, start = self.next()
        name = text.lower()
        if group != "word":
            self.fail(f"expected a type, found {self.shown(text)}", start)
        if name in _PLAIN:
            self.collation(name)
            return _PLAIN[name]
        if name in _NESTED:
            return self.nested(name)
        if name in _DECIMALS:
            return self.decimal(start)
        if name in _LENGTHS:
            self.numbers(1, 1, start)
            self.collation(name)
            return pa.string()
        if name == "time":
            self.numbers(0, 1, start)
            return pa.time64("us")
        if name in _WITHOUT_ARROW:
            self.fail(f"a column here cannot be {name}; {_WITHOUT_ARROW[name]}", start)
        near = _FOREIGN.get(name) or next(iter(difflib.get_close_matches(name, _NAMES, 1)), None)
        hint = f"Did you mean {near}?" if near else f"Types are {', '.join(_NAMES)}"
        self.fail(f"unknown type {text!r}. {hint}", start)

    def nested(self, name: str) -> pa.DataType:
        expected = {"array": "array<float>", "map": "map<string,int>", "struct": "struct<a:float>"}
        self.expect("<", f"{name} needs the types inside it, as {expected[name]}")
        if name == "array":
            kind = pa.list_(self.kind())
        elif name == "map":
            key = self.kind()
            self.expect(",", "a map has two types, as map<string,int>")
            kind = pa.map_(key, self.kind())
        else:
            empty = self.tokens[self.at][1] == ">"
            kind = _struct([] if empty else self.fields(), self.where)
        self.expect(">", f"{name}< is not closed")
        return kind

    def fields(self) -> list[tuple[str, pa.DataType]]:
        fields = [self.field()]
        while self.accept(","):
            fields.append(self.field())
        return fields

    def field(self) -> tuple[str, pa.DataType]:
        group, text, start = self.next()
        if group not in ("word", "quoted"):
            self.fail(f"expected the name of a field, found {self.shown(text)}", start)
        name = text[1:-1].replace("``", "`") if group == "quoted" else text
        if not name:
            self.fail("a field has no name", start)
        self.accept(":")
        if self.tokens[self.at][1] in ("", ",", ">"):
            self.fail(f"field {name!r} has no type; write it as {text} float", start)
        kind = self.kind()
        if self.accept("not"):
            self.expect("null", "only NOT NULL can follow a type")
        if self.accept("comment") and self.next()[0] != "text":
            self.fail("COMMENT is followed by a quoted text", self.tokens[self.at - 1][2])
        return name, kind

    def decimal(self, start: int) -> pa.DataType:
        given = self.numbers(0, 2, start)
        precision, scale = given + (10, 0)[len(given) :]
        if not 1 <= precision <= 38 or not 0 <= scale <= precision:
            self.fail(
                f"decimal({precision},{scale}) is out of range; a decimal has 1 to 38 digits, of "
                "which 0 to all follow the point",
                start,
            )
        return pa.decimal128(precision, scale)

    def numbers(self, fewest: int, most: int, start: int) -> tuple[int, ...]:
        """Parse ``(10,2)``; an absent list has no numbers."""
        found: list[int] = []
        if self.accept("("):
            while True:
                _, text, at = self.next()
                if not text.isdecimal():
                    self.fail(f"expected a number, found {self.shown(text)}", at)
                found.append(int(text))
                if not self.accept(","):
                    break
            self.expect(")", "( is not closed")
        if not fewest <= len(found) <= most:
            self.fail(
                f"expected {'a length' if fewest else f'at most {most}'} in parentheses, found "
                f"{len(found)} numbers",
                start,
            )
        return tuple(found)

    def collation(self, name: str) -> None:
        """Skip the collation of a string, which changes comparisons and not the values."""
        if name in ("string", *_LENGTHS) and self.accept("collate"):
            self.next()

    def next(self) -> tuple[str, str, int]:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def accept(self, text: str) -> bool:
        group, found, _ = self.tokens[self.at]
        if group == "quoted" or found.lower() != text:
            return False
        self.at += 1
        return True

    def expect(self, text: str, why: str) -> None:
        _, found, start = self.tokens[self.at]
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.shown(found)}; {why}", start)

    def end(self) -> None:
        group, text, start = self.tokens[self.at]
        if group != "end":
            self.fail(
                f"unexpected {self.shown(text)} after the type; columns are separated by commas",
                start,
            )

    def fail(self, problem: str, start: int) -> NoReturn:
        raise SchemaError(
            f"{self.where}: return_type {self.ddl!r}, character {start + 1}: {problem}"
        )

    @staticmethod
    def shown(text: str) -> str:
        return repr(text) if text else "the end"
