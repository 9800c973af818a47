"""What a reply consists of, in the order in which it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of the tool `name`, the reply's `index`-th; `id` where the model gave one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of the arguments of call `index`, which together are a JSON object.

    They are no valid JSON only where the model wrote none, or the reply ended within them.
    """

    index: int
    text: str


Piece = Content | Reasoning | ToolCallStart | ToolCallArguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind made one, and without empty ones."""
    result: list[Piece] = []
    for piece in pieces:
        match (result[-1] if result else None), piece:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                if isinstance(piece, ToolCallStart) or piece.text:
                    result.append(piece)
    return result
