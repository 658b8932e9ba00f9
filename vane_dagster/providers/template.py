"""Messages of a row: from a column of prompts or conversations, or by a template."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import DefinitionError, names
from vane_dagster.providers.base import Message

_ALIKE = 256
"""Length in characters of the common prefix that groups prompts."""
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Template:
    """The template of a row's messages.

    Attributes:
        text: A column name, or text with ``{column}`` fields; empty if a function makes prompts.
        fields: The columns that it reads.
        column: Whether `text` is a column name.
        system: The system message; None for none.
    """

    text: str
    fields: tuple[str, ...]
    column: bool
    system: str | None = None

    @property
    def fixed(self) -> int:
        """Number of characters before the first column."""
        if self.column:
            return 0
        return len(next(iter(string.Formatter().parse(self.text)))[0])

    def messages(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Return the messages of a row."""
        for name in self.fields:
            if row.get(name) is None:
                raise ValueError(f"column {name!r} is null; a prompt needs it")
        if self.column:
            return self.with_system(row[self.text], f"column {self.text!r}")
        return self.with_system(self.text.format_map(row), "the template")

    def with_system(self, prompt: Any, origin: str) -> Sequence[Message]:
        """Return the messages of a prompt or a conversation, after the system message."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        if not isinstance(prompt, str):
            return [*first, *_conversation(origin, prompt)]
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return [*first, {"role": "user", "content": prompt}]


@dataclass(frozen=True)
class PrefixOrder:
    """Orders rows by prompt: one worker processes prompts with a common prefix together.

    Attributes:
        template: The template of the prompts.
    """

    template: Template

    def keys(self, rows: pa.Table) -> list[tuple[str, str]]:
        """Return the start of each row's prompt as its group, and the whole prompt as its rank.

        The fixed start of the template is skipped, since all prompts share it.
        """
        fixed = len(self.template.system or "") + self.template.fixed
        texts = [self._text(row) for row in rows.select(list(self.template.fields)).to_pylist()]
        return [(text[fixed : fixed + _ALIKE], text) for text in texts]

    def _text(self, row: Mapping[str, Any]) -> str:
        try:
            return "".join(message["content"] for message in self.template.messages(row))
        except ValueError:  # a row error, raised when the row is submitted
            return ""


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
    """Parse a column name or a template."""
    if not isinstance(messages, str) or not messages.strip():
        raise DefinitionError(
            f"{where}: messages is {messages!r}; expected a column's name, or text with {{column}} "
            "fields"
        )
    system = parse_system(where, system)
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
