"""Messages of a row: from a column of prompts or conversations, or by a template."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, names
from vane_dagster.providers.base import Media, Message
from vane_dagster.providers.content import Content, ReadFile

_ROLES = ("system", "user", "assistant", "tool")
_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Text:
    """A part of a message: text with ``{column}`` fields, or a column.

    Attributes:
        text: The text, or the name of a column of prompts or conversations.
        fields: The columns that it reads.
        is_column: Whether `text` is a column's name.
    """

    text: str
    fields: tuple[str, ...]
    is_column: bool = False

    @property
    def keyed(self) -> str:
        """The values that change a request."""
        return self.text

    def __str__(self) -> str:
        return f"column `{self.text}`" if self.is_column else self.text

    def values(self, row: Mapping[str, Any], read_file: ReadFile | None) -> list[Any]:
        """Return the text of a row, or the value of the column."""
        if self.is_column:
            return [row[self.text]]
        return [self.text.format_map({name: _shown(row[name]) for name in self.fields})]


def _shown(value: Any) -> Any:
    """Return a value as a template shows it: a struct, list or map as JSON."""
    if not isinstance(value, (list, dict)):
        return value
    return json.dumps(_jsonable(value), ensure_ascii=False, default=_json_text)


def _jsonable(value: Any) -> Any:
    """Return a value with objects in place of maps, which are lists of pairs."""
    if isinstance(value, dict):
        return {name: _jsonable(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], tuple):
        return {str(key): _jsonable(each) for key, each in value}
    return [*map(_jsonable, value)]


def _json_text(value: Any) -> str:
    """Return the text of a value that JSON lacks."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def single_column(value: Any) -> str | None:
    """Return the column that ``"{column}"`` reads from each row; None for any other value."""
    match = _COLUMN.fullmatch(value) if isinstance(value, str) else None
    return match and match[1]


Turn = tuple[str, tuple["Text | Content", ...]]
"""The role and the parts of a message."""


@dataclass(frozen=True)
class Template:
    """The template of a row's messages.

    Attributes:
        turns: The messages; empty if a function makes them.
        system: The system message; None for none.
    """

    turns: tuple[Turn, ...] = ()
    system: str | None = None

    def __str__(self) -> str:
        """Return a line for each message, with the role if the user's is not the only one."""
        system = [] if self.system is None else [("system", self.system)]
        turns = [*system, *((role, " ".join(map(str, parts))) for role, parts in self.turns)]
        if [role for role, _ in turns] == ["user"]:
            return turns[0][1]
        return "\n".join(f"{role}: {text}" for role, text in turns)

    @property
    def parts(self) -> Sequence[Text | Content]:
        """The parts of all messages."""
        return [part for _, parts in self.turns for part in parts]

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.fields))

    @property
    def contents(self) -> Sequence[Content]:
        """The parts that are not text."""
        return [part for part in self.parts if isinstance(part, Content)]

    @property
    def keyed(self) -> Any:
        """The values that change a request, besides the system message, in a frozen order."""
        match self.turns:
            case ():
                return ""
            case (("user", (Text() as only,)),):
                return only.text
        return tuple((role, tuple(part.keyed for part in parts)) for role, parts in self.turns)

    @property
    def leading(self) -> Template:
        """The template of the texts before the first part that is not text, as one message."""
        texts = tuple(takewhile(lambda part: isinstance(part, Text), self.parts))
        return Template((("user", texts),) if texts else (), self.system)

    def messages(
        self, row: Mapping[str, Any], read_file: ReadFile | None = None
    ) -> Sequence[Message]:
        """Return the messages of a row.

        Args:
            row: The values of its columns.
            read_file: Reads the files that a row names; None to refuse such rows.
        """
        for name in self.fields:
            if row.get(name) is None:
                raise ValueError(f"column {name!r} is null; a prompt needs it")
        made = [*self._first]
        for role, parts in self.turns:
            values = chain.from_iterable(part.values(row, read_file) for part in parts)
            origin = f"column {parts[0].fields[0]!r}" if parts[0].fields else "the template"
            made += _messages(role, [*values], origin)
        return made

    def with_system(self, prompt: Any, origin: str) -> Sequence[Message]:
        """Return the messages of a prompt or a conversation, after the system message."""
        return [*self._first, *_messages("user", [prompt], origin)]

    @property
    def _first(self) -> Sequence[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def rendered(self, rows: pa.Table) -> list[str]:
        """Return the prompt of each row as one text, for templates of texts alone."""
        return [self._rendered(row) for row in rows.select(list(self.fields)).to_pylist()]

    def _rendered(self, row: Mapping[str, Any]) -> str:
        try:
            return "".join(str(message["content"]) for message in self.messages(row))
        except ValueError:  # a row error, raised when the row is submitted
            return ""


def _messages(role: str, values: Sequence[Any], origin: str) -> Sequence[Message]:
    """Return the message of some parts, or the conversation that the only one is."""
    if len(values) == 1 and not isinstance(values[0], (str, Media)):
        return _conversation(origin, values[0])
    said = [value for value in values if isinstance(value, Media) or value.strip()]
    if not said:
        raise ValueError("the prompt is empty")
    has_media = any(isinstance(value, Media) for value in said)
    return [{"role": role, "content": said if has_media else "\n".join(said)}]


def _conversation(origin: str, value: Any) -> list[Message]:
    fits = isinstance(value, list) and value
    if not fits or not all(
        isinstance(m, dict) and m.get("role") in _ROLES and m.get("content") for m in value
    ):
        raise ValueError(
            f"{origin} holds a {type(value).__name__}; expected text, or a list of messages, each "
            f"with content and a role of {names(_ROLES)}"
        )
    return [{"role": m["role"], "content": m["content"]} for m in value]


def parse_system(where: str, system: Any) -> str | None:
    """Validate a system message; None for none."""
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise DefinitionError(f"{where}: system is {system!r}; expected text, or None")
    return system


def parse_template(where: str, messages: Any, system: Any) -> Template:
    """Parse a column name, a template, a list of templates and content, or a list of messages."""
    system = parse_system(where, system)
    if isinstance(messages, str):
        only = _parse_text(where, messages)
        is_name = not only.fields and len(messages.split()) == 1 and "{{" not in messages
        turns: list[Turn] = [("user", (Text(messages, (messages,), True) if is_name else only,))]
    elif isinstance(messages, (list, tuple)) and all(isinstance(m, Mapping) for m in messages):
        turns = [_parse_turn(where, message) for message in messages]
    else:
        turns = [("user", _parse_parts(where, messages))]
    template = Template(tuple(turns), system)
    if not template.fields:
        raise DefinitionError(
            f"{where}: messages names no column: {str(messages)[:80]!r}. Put one in, for example "
            "'Summarise: {text}'"
        )
    return template


def _parse_turn(where: str, message: Mapping[Any, Any]) -> Turn:
    """Parse a message with its role."""
    if set(message) != {"role", "content"} or message["role"] not in _ROLES:
        raise DefinitionError(
            f"{where}: messages has {dict(message)!r}; expected content and a role of "
            f"{names(_ROLES)}"
        )
    role, content = message["role"], message["content"]
    parts = _parse_parts(where, [content] if isinstance(content, str) else content)
    if role != "user" and (wrong := [part for part in parts if isinstance(part, Content)]):
        raise DefinitionError(
            f"{where}: messages has {wrong[0]} in a message of the {role}; models take other "
            "content than text only from the user"
        )
    return role, parts


def _parse_parts(where: str, parts: Any) -> tuple[Text | Content, ...]:
    """Parse the texts and the content of a message."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise _unfit(where, parts)
    return tuple(part if isinstance(part, Content) else _parse_text(where, part) for part in parts)


def _parse_text(where: str, text: Any) -> Text:
    """Parse a text with fields."""
    if not isinstance(text, str) or not text.strip():
        raise _unfit(where, text)
    try:
        names = [*_field_names(text)]
    except ValueError as error:
        raise DefinitionError(
            f"{where}: messages is not a template: {error}. Write {{{{ and }}}} for braces"
        ) from None
    if wrong := [name for name in names if not name or not _is_plain(name)]:
        raise DefinitionError(
            f"{where}: messages has the field {{{wrong[0]}}}; expected the name of a column. Write "
            "{{ and }} for braces"
        )
    return Text(text, tuple(dict.fromkeys(names)))


def _field_names(text: str) -> Iterator[str]:
    """Yield the fields of a template, also those in the format of another one."""
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None:
            yield name
            yield from _field_names(spec or "")


def _unfit(where: str, messages: Any) -> DefinitionError:
    return DefinitionError(
        f"{where}: messages is {messages!r}; expected a column's name, text with {{column}} "
        "fields, a list of such texts and vd.image, vd.audio or vd.document, or a list of messages "
        "with role and content"
    )


def _is_plain(name: str) -> bool:
    return not set(name) & set(".[]!:\"'\n") and not name.isdigit()
