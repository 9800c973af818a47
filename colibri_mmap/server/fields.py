"""What the bodies of all APIs are made of.

A field that is not listed is refused by name, and one that is null counts as not given. Fields
that change nothing here are accepted, each with its reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from colibri_mmap.runtime.sampling import Sampling

MOST_STOPS = 16


def unsupported(message: str, field: str = "") -> PydanticCustomError:
    """A value of `field`, or of the one being validated, that this server cannot serve."""
    return PydanticCustomError("unsupported_value", "{said}", {"said": message, "field": field})


def wrong(message: str, field: str) -> PydanticCustomError:
    """A value of `field` that does not go with another one."""
    return PydanticCustomError("invalid_value", "{said}", {"said": message, "field": field})


class Body(BaseModel):
    """A JSON object of known fields and strict types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: field for name, field in value.items() if field is not None}
        return value


# ------------------------------------------------------------------------------ text and strings
def join_parts(value: Any) -> Any:
    """The text of a message that is written as a list of parts."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise unsupported(f"part {number} is of type {kind!r}; this server reads text only")
        if not isinstance(part.get("text"), str):
            raise unsupported(f"part {number} has no text")
        texts.append(part["text"])
    return "\n".join(texts)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Text = Annotated[
    str,
    BeforeValidator(join_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_listed),
    Field(max_length=MOST_STOPS),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "maxItems": MOST_STOPS,
                },
            ]
        }
    ),
]


# ------------------------------------------------------------------------------ what all share
# Bounds far beyond what is of use: logits must stay numbers.
Temperature = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]


def sampling_of(defaults: Sampling, **wanted: Any) -> Sampling:
    """`defaults` with the wanted settings, where not None; top-p 0 keeps the likeliest token."""
    given = {name: value for name, value in wanted.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])
    if "top_p" in given:
        given["top_p"] = max(1e-9, given["top_p"])
    return replace(defaults, **given)
