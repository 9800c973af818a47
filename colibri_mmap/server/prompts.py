"""What a conversation becomes for the model: ids to continue, and how to read what follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_mmap.runtime.grammar import Grammar

from .delivery import Parser, PlainText
from .loaded import LoadedModel
from .problems import refuse

# Variables of templates that are not a request's to set.
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"),
        *("range", "raise_exception", "strftime_now", "self", "loop", "namespace"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request for a reply, as templates take it, whatever API it came by.

    `variables`: of the template, by the field that asks for them. `hints`: those that are left out
    where the template does not know them. `grammar`: what the reply's content has to be.
    `must_call`: the reply has to call one of the tools.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    must_call: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered text, its ids, and what the reply has to be."""

    text: str
    ids: list[int]
    grammar: Grammar | None

    def parser(self) -> Parser:
        """Reads one reply."""
        return PlainText()


def chat_prompt(model: LoadedModel, conversation: Conversation) -> ChatPrompt:
    """Render a conversation; a last message of the assistant is the beginning of the reply.

    Takes a while for a long one.
    """
    messages, begun = list(conversation.messages), ""
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        if not messages or "tool_calls" in last:
            raise refuse("messages", "the last message leaves nothing to reply to")
        begun = last["content"]
    tools = list(conversation.tools)
    if tools and not _knows(model, "tools"):
        raise refuse("tools", "the model's chat template knows no tools", "unsupported_field")
    text = model.template.render(messages, tools=tools or None, **_variables(model, conversation))
    text += begun
    return ChatPrompt(text, model.engine.prompt_ids(text), conversation.grammar)


def _variables(model: LoadedModel, conversation: Conversation) -> dict[str, Any]:
    """The template's variables that the request sets; a 400 for one that it does not have."""
    variables = {name: value for name, value in conversation.hints.items() if _knows(model, name)}
    for source, wanted in conversation.variables.items():
        for name, value in wanted.items():
            if name in _RESERVED or not _knows(model, name):
                message = f"the model's chat template has no variable {name!r} to set"
                raise refuse(source, message, "unsupported_value")
            variables[name] = value
    return variables


def _knows(model: LoadedModel, name: str) -> bool:
    """Whether the template mentions a variable."""
    return re.search(rf"\b{re.escape(name)}\b", model.template.source) is not None
