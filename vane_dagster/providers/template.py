"""Messages made from a row: from a column of prompts or conversations, or by a template."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, names
from vane_dagster.providers.base import Message

_ALIKE = 256
"""Characters of prompts that make it worth to ask about them together."""
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Template:
    """What a row's messages are made of.

    Attributes:
        text: A column's name, or text with ``{column}`` fields.
        fields: The columns that it reads.
        column: Whether it is a column's name.
        system: The system message; None for none.
    """

    text: str
    fields: tuple[str, ...]
    column: bool
    system: str | None = None

    @property
    def fixed(self) -> int:
        """Characters before the first column."""
        if self.column:
            return 0
        return len(next(iter(string.Formatter().parse(self.text)))[0])

    def messages(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The messages of a row.

        Raises:
            ValueError: If a column that it needs is null or empty, or is no conversation.
        """
        for name in self.fields:
            if row[name] is None:
                raise ValueError(f"column {name!r} is null; a prompt needs it")
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        if not self.column:
            text = self.text.format_map(row)
        elif isinstance(row[self.text], str):
            text = row[self.text]
        else:
            return [*first, *_conversation(self.text, row[self.text])]
        if not text.strip():
            raise ValueError("the prompt is empty")
        return [*first, {"role": "user", "content": text}]


@dataclass(frozen=True)
class PrefixOrder:
    """Rows whose prompts begin alike, side by side and at one worker.

    Attributes:
        template: What prompts are made of.
    """

    template: Template

    def keys(self, rows: pa.Table) -> list[tuple[str, str]]:
        """For each row some of its prompt's beginning, and the prompt.

        What a template begins with is all prompts' own and tells nothing.
        """
        fixed = len(self.template.system or "") + self.template.fixed
        texts = [self._text(row) for row in rows.select(list(self.template.fields)).to_pylist()]
        return [(text[fixed : fixed + _ALIKE], text) for text in texts]

    def _text(self, row: Mapping[str, Any]) -> str:
        try:
            return "".join(message["content"] for message in self.template.messages(row))
        except ValueError:  # of the row, which is told when it is asked about
            return ""


def _conversation(column: str, value: Any) -> list[Message]:
    fits = isinstance(value, list) and value
    if not fits or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise ValueError(
            f"column {column!r} holds a {type(value).__name__}; expected text, or a list of "
            "messages with role and content that is not empty"
        )
    if wrong := [m["role"] for m in value if m["role"] not in _ROLES or not m["content"]]:
        raise ValueError(
            f"column {column!r}: a message of role {wrong[0]!r} has no content, or the role is "
            f"none of {names(_ROLES)}"
        )
    return [{"role": m["role"], "content": m["content"]} for m in value]


def parse_template(where: str, messages: Any, system: Any) -> Template:
    """Reads a column's name or a template.

    Raises:
        DefinitionError: If it is neither.
    """
    if not isinstance(messages, str) or not messages.strip():
        raise DefinitionError(
            f"{where}: messages is {messages!r}; expected a column's name, or text with {{column}} "
            "fields"
        )
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise DefinitionError(f"{where}: system is {system!r}; expected text, or None")
    try:
        parts = list(string.Formatter().parse(messages))
    except ValueError as error:
        raise DefinitionError(
            f"{where}: messages is no template: {error}. Write {{{{ and }}}} for braces"
        ) from None
    found = [name for _, name, _, _ in parts if name is not None]
    if wrong := [name for name in found if not name or not _is_plain(name)]:
        raise DefinitionError(
            f"{where}: messages has the field {{{wrong[0]}}}; expected the name of a column. Write "
            "{{ and }} for braces"
        )
    if not found and (len(messages.split()) > 1 or "{{" in messages):
        raise DefinitionError(
            f"{where}: messages names no column: {messages[:80]!r}. Put one into it, as in "
            "'Summarise: {text}'"
        )
    fields = tuple(dict.fromkeys(found)) if found else (messages,)
    return Template(messages, fields, not found, system)


def _is_plain(name: str) -> bool:
    return not set(name) & set(".[]!:\"'\n") and not name.isdigit()
