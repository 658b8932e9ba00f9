"""Formats of an answer: text, one of some choices, or JSON that fits a schema."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from vane_dagster._arguments import unexpected
from vane_dagster.errors import CostlyError, DefinitionError, described, names
from vane_dagster.providers.base import Answer
from vane_dagster.providers.usage import counted

_SCALARS = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_MAX_SHOWN = 4000
_FENCE = re.compile(r'```(\w*(?=[\s{\["]))?')
"""The beginning of a Markdown code fence, with the name of a language."""
_UNFIT = (ValueError, RecursionError)
"""What an answer raises that does not fit; the latter for JSON that is nested too deeply."""


class InvalidAnswer(CostlyError):
    """A model's answer does not fit the requested format; the message contains its text.

    Attributes:
        problem: Why it does not fit.
        used: The answer's usage, by the names of `COUNTS`. It is charged nevertheless.
    """

    def __init__(self, problem: str, answer: Answer) -> None:
        cut = " It was cut: raise max_tokens." if answer.finish_reason == "length" else ""
        text = f" The answer: {answer.text[:_MAX_SHOWN]}" if answer.text else ""
        super().__init__(f"{problem}.{cut}{text}")
        self.problem, self.used = problem, counted(answer)


def finished(text: str | None, answer: Answer, refusal: Any = None) -> Answer:
    """Return an answer with its text, which is empty only if the model ended it by itself."""
    ended = answer.finish_reason in ("stop", "") and text is not None and not refusal
    if text or ended:
        return replace(answer, text=text or "")
    problem = f"The model gave no answer (finish_reason {answer.finish_reason!r})"
    reason = f": {refusal}".rstrip(".") if refusal else ""
    raise InvalidAnswer(f"{problem}{reason}", answer)


@dataclass(frozen=True)
class Format:
    """The format of an answer.

    Attributes:
        type: The Arrow type of the column of answers.
        schema: JSON schema that the answer must fit; None for plain text.
        choices: The only valid answers; empty for any answer.
        model: A pydantic model that validates the answer.
    """

    type: pa.DataType = field(default_factory=pa.string)
    schema: Mapping[str, Any] | None = None
    choices: tuple[str, ...] = ()
    model: Any = None

    @property
    def is_preloaded(self) -> bool:
        """Whether it has a model that only a worker with its modules has; see `PromptTask`."""
        return self.model is not None

    @functools.cached_property
    def _validator(self) -> Any:
        from jsonschema.validators import validator_for

        return validator_for(self.schema)(self.schema)

    def value(self, answer: Answer) -> Any:
        """Return the answer as a value of `type`."""
        try:
            return self._parsed(answer.text)
        except _UNFIT as error:
            raise InvalidAnswer(str(error), answer) from error

    def _parsed(self, text: str) -> Any:
        if self.choices:
            for alike in (str.strip, str.casefold, _bare):
                same = [choice for choice in self.choices if alike(choice) == alike(text)]
                if len(same) == 1:
                    return same[0]
            raise ValueError(f"The answer is none of {names(self.choices, 20)}")
        if self.schema is None:
            return text
        try:
            value = json.loads(_without_fence(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"The answer is not JSON: {error}") from None
        if self.model is not None:
            try:
                return self.model.model_validate(value).model_dump(mode="json", by_alias=False)
            except ValueError as error:  # includes pydantic's own
                raise ValueError(f"The answer does not fit: {_one_line(error)}") from None
        from jsonschema.exceptions import best_match

        if (wrong := best_match(self._validator.iter_errors(value))) is not None:
            raise ValueError(f"The answer does not fit: {wrong.json_path}: {wrong.message}")
        return value


def _without_fence(text: str) -> str:
    """Remove the Markdown code fence that models often put around JSON."""
    text = text.strip()
    if text.startswith("```"):
        text = _FENCE.sub("", text, count=1).rpartition("```")[0]
    return text


def _bare(text: str) -> str:
    """Return a choice as models write it otherwise: in other letters, quoted, with a full stop."""
    return text.strip().strip("\"'`.").casefold()


def _one_line(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return " ".join(str(error).split())
    problems = [f"{'.'.join(str(p) for p in e['loc']) or 'answer'}: {e['msg']}" for e in errors()]
    return "; ".join(problems)


def parse_format(where: str, return_format: Any) -> Format:
    """Parse a pydantic model, a JSON schema or a list of choices."""
    if return_format is None:
        return Format()
    if inspect.isclass(return_format) and hasattr(return_format, "model_json_schema"):
        # A model may call its fields by aliases; they are stored under their own names.
        stored, asked = (return_format.model_json_schema(by_alias=a) for a in (False, True))
        return Format(_type(where, stored), asked, model=return_format)
    if isinstance(return_format, Mapping):
        return _schema_format(where, json.loads(json.dumps(return_format)))
    texts = isinstance(return_format, Sequence) and not isinstance(return_format, str)
    if texts and return_format and all(isinstance(c, str) and c.strip() for c in return_format):
        if len({c.casefold() for c in return_format}) < len(return_format):
            raise DefinitionError(f"{where}: return_format has a choice twice: {return_format}")
        return Format(choices=tuple(return_format))
    expected = "a pydantic model, a JSON schema as a dict, or a list of choices"
    raise unexpected(where, "return_format", return_format, expected)


def _schema_format(where: str, schema: Mapping[str, Any]) -> Format:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise DefinitionError(
            f"{where}: return_format is not a JSON schema: {error.json_path}: {error.message}"
        ) from None
    return Format(_type(where, schema), schema)


def _type(where: str, schema: Mapping[str, Any]) -> pa.DataType:
    """Return the Arrow type of values that fit a JSON schema."""
    try:
        return _arrow(where, schema, schema)
    except (RecursionError, pa.ArrowException, LookupError, TypeError, AttributeError) as error:
        reason = "it refers to itself" if isinstance(error, RecursionError) else described(error)
        raise DefinitionError(f"{where}: return_format has no column type: {reason}") from error


def _arrow(where: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> pa.DataType:
    """Return the Arrow type of values that fit a part of a JSON schema."""
    if "$ref" in schema:
        node: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            node = node[step]
        return _arrow(where, node, root)
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kind := schema.get("type"), list):
        options = [{**schema, "type": each} for each in kind]
    if options:
        kinds = {_arrow(where, o, root) for o in options if o.get("type") != "null"}
        if len(kinds) == 1:
            return kinds.pop()
        raise DefinitionError(
            f"{where}: return_format allows several types in one place, {json.dumps(schema)[:200]};"
            " a column has one"
        )
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return pa.array([value for value in values if value is not None]).type
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return pa.list_(_arrow(where, schema["items"], root))
    if kind == "object" and schema.get("properties"):
        fields = {n: _arrow(where, s, root) for n, s in schema["properties"].items()}
        return pa.struct([pa.field(n, t) for n, t in fields.items()])
    if kind in _SCALARS:
        return _SCALARS[kind]
    raise DefinitionError(
        f"{where}: return_format has a part without a column type: {json.dumps(schema)[:200]}. "
        "Give each part a type, arrays their items, and objects their properties"
    )
