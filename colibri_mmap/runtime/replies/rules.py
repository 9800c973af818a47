"""Grammar rules for tool calls as a model writes them; runtime/grammar.py imposes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from colibri_mmap.runtime.grammar import JSON_OPTIONS, stands_alone
from colibri_mmap.runtime.tokenizer import Tokenizer

_DEFINITIONS = ("$defs", "definitions")


class Rules:
    """Lark rules under construction for one tokenizer; those of a call have names of their own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._rules)

    def add(self, name: str, body: str, options: str = "") -> str:
        """Define a rule; its name, with which others refer to it."""
        self._rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly `text`; special tokens in it are named by their ids."""
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True, at_start=False)
        parts, rest = [], text
        for token in ids:
            name = self._tokenizer.token_text(token)
            if stands_alone(self._tokenizer, token) and name in rest:
                before, _, rest = rest.partition(name)
                parts += [json.dumps(before), f"<[{token}]>"]
        return " ".join(part for part in [*parts, json.dumps(rest)] if part != '""') or '""'

    def fill(self, form: str, **values: str) -> str:
        """`form` with each {key} replaced by a rule, the rest literally."""
        pieces = re.split(r"\{(\w+)\}", form)
        filled = [values[p] if i % 2 else self.literal(p) for i, p in enumerate(pieces) if p]
        return " ".join(filled)

    def some(self, rule: str, several: bool, between: str = r'"\n"?') -> str:
        """`rule`, or `several` of it."""
        return f"{rule} ({between} {rule})*" if several else rule

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        """A rule for JSON that `schema` describes."""
        return self.add(name, f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}")

    def any_text(self, name: str, end: str) -> str:
        """A rule for any text up to and including the first `end`."""
        literal = self.literal(end)
        if literal.startswith("<["):
            return self.add(name, f"/(?s:.*)/ {literal}")
        return self.add(name, "/(?s:.*)/", f"[suffix={literal}]")


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments."""
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, Mapping) and parameters else {"type": "object"}


def call_schema(function: Mapping[str, Any], parameters_key: str) -> dict[str, Any]:
    """The JSON schema of {"name": ..., parameters_key: {...}}."""
    parameters = _moved(parameters_of(function), f"#/properties/{parameters_key}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, parameters_key: parameters},
        "required": ["name", parameters_key],
        "additionalProperties": False,
    }


def property_schema(parameters: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON schema of one parameter, standing alone."""
    definitions = {name: parameters[name] for name in _DEFINITIONS if name in parameters}
    return {**definitions, **parameters["properties"][key]}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one: its references are moved with it."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema
