"""The text of a reply taken apart: what is said, what is thought, and which tools are called."""

from colibri_mmap.runtime.replies.format import ReplyFormat
from colibri_mmap.runtime.replies.parser import ReplyParser
from colibri_mmap.runtime.replies.pieces import (
    Content,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

__all__ = [
    "Content",
    "Piece",
    "Reasoning",
    "ReplyFormat",
    "ReplyParser",
    "ToolCallArguments",
    "ToolCallStart",
]
