"""Spark's types as users write them: DDL strings and objects of `pyspark.sql.types`.

DuckDB parses the types of single values, and a few names mean another type in Spark.
"""

from __future__ import annotations

import re

import pyarrow as pa

from vane_dagster._lazy import duckdb
from vane_dagster.errors import SchemaError
from vane_dagster.types.schema import check_distinct, sql_type

_OWN: dict[str, pa.DataType] = {
    "byte": pa.int8(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    **dict.fromkeys(("decimal", "dec", "numeric"), pa.decimal128(10, 0)),
}
_NESTED = ("array", "map", "struct")
_LENGTH = re.compile(r"(char|character|varchar|time)\s*\(\s*\d+\s*\)", re.IGNORECASE)
_TOKEN = re.compile(
    r"""`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+(?:\s*\([^()]*\))?|\S""", re.DOTALL
)


def parse_return_type(return_type: object, where: str) -> pa.DataType:
    """Convert the `return_type` of a Spark UDF to an Arrow type, as Spark converts it."""
    if isinstance(return_type, pa.DataType):
        return return_type
    ddl = getattr(return_type, "simpleString", lambda: return_type)
    if isinstance(return_type, type) and hasattr(return_type, "simpleString"):
        name = return_type.__name__
        raise SchemaError(f"{where}: return_type is the class {name}; write {name}()")
    if not isinstance(text := ddl(), str):
        raise SchemaError(
            f"{where}: return_type is a {type(return_type).__name__}; expected a DDL string, as "
            "'array<float>' or 'label string, score double', or a pyspark.sql.types.DataType"
        )
    return _Parser(text, where).parse()


class _Parser:
    """A recursive descent over the tokens of a DDL string."""

    def __init__(self, ddl: str, where: str) -> None:
        self.ddl, self.where = ddl, where
        self.tokens: list[str] = [*_TOKEN.findall(ddl), "", "", ""]
        self.at = 0

    def parse(self) -> pa.DataType:
        """Parse a type, or a list of columns, which is a struct."""
        is_type = self.tokens[1] in ("", "<", ">")
        kind = self.kind() if is_type else self.struct()
        self.expect("", "the end, or a comma between columns")
        return kind

    def kind(self) -> pa.DataType:
        name = self.next()
        if (known := name.lower()) in _OWN:
            return _OWN[known]
        if known not in _NESTED:
            try:
                return sql_type(_LENGTH.sub(r"\1", name))
            except (duckdb.Error, SchemaError):
                self.at -= 1
                raise self.unexpected("a type, such as array<float>") from None
        self.expect("<")
        if known == "struct":
            kind = self.struct()
        elif known == "array":
            kind = pa.list_(self.kind())
        else:
            key = self.kind()
            self.expect(",")
            kind = pa.map_(key, self.kind())
        self.expect(">")
        return kind

    def struct(self) -> pa.DataType:
        fields = [self.field()]
        while self.accept(","):
            fields.append(self.field())
        check_distinct([name for name, _ in fields], self.where)
        return pa.struct(fields)

    def field(self) -> tuple[str, pa.DataType]:
        text = self.next()
        name = text[1:-1].replace("``", "`") if text[:1] == "`" else text
        if not name or not re.fullmatch(r"`.*`|\w+", text, re.DOTALL):
            self.at -= 1
            raise self.unexpected("the name of a field")
        self.accept(":")
        kind = self.kind()
        if self.accept("not"):
            self.expect("null")
        if self.accept("comment"):
            self.next()
        return name, kind

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, text: str) -> bool:
        is_next = self.tokens[self.at].lower() == text
        self.at += is_next
        return is_next

    def expect(self, text: str, expected: str = "") -> None:
        if not self.accept(text):
            raise self.unexpected(expected or repr(text))

    def unexpected(self, expected: str) -> SchemaError:
        rest = " ".join(self.tokens[self.at :]).strip()
        return SchemaError(
            f"{self.where}: return_type {self.ddl!r}: expected {expected}, at "
            f"{repr(rest) if rest else 'the end'}"
        )
