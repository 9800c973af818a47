"""What a conversation becomes for the model: ids to continue, and how to read what follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_mmap.runtime.grammar import Grammar
from colibri_mmap.runtime.replies.parser import ReplyParser

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
    where the template does not know them. `form`: what the content has to be, and the field that
    says so. `must_call`: the reply has to call a tool; `several` if it may be more than one.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    several: bool = True
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    form: tuple[str, Grammar] | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered text, its ids, what the reply has to be and how it is read.

    `is_turn`: the text ends where a reply of the assistant begins, not within it.
    """

    model: LoadedModel
    text: str
    ids: list[int]
    is_turn: bool
    tools: Sequence[Mapping[str, Any]]
    grammar: Grammar | None

    def parser(self) -> ReplyParser:
        """Reads one reply."""
        return self.model.format.parser(self.text, self.tools)


def chat_prompt(model: LoadedModel, conversation: Conversation) -> ChatPrompt:
    """Render a conversation; a last message of the assistant is the beginning of the reply.

    Takes a while for a long one.
    """
    messages, begun = list(conversation.messages), None
    if messages[-1]["role"] == "assistant":
        begun = messages.pop()
    tools = list(conversation.tools)
    if tools and not (model.format.has_calls and _knows(model, "tools")):
        raise refuse("tools", "the model's chat template knows no tools", "unsupported_field")
    variables = _variables(model, conversation)
    text = model.template.render(messages, tools=tools or None, **variables)
    if begun is not None:
        text += _beginning(model, text, messages, begun)
    grammar = _grammar(model, conversation, text)
    ids = model.engine.prompt_ids(text)
    return ChatPrompt(model, text, ids, begun is None, tools, grammar)


def _beginning(
    model: LoadedModel, prompt: str, messages: Sequence[Any], message: Mapping[str, Any]
) -> str:
    """The text of a reply that the request has begun."""
    if not messages or "tool_calls" in message or model.format.is_harmony:
        raise refuse("messages", "the last message leaves nothing to reply to")
    thinking, thoughts = model.format.thinking, message.get("reasoning_content", "")
    content: str = message["content"]
    if thinking is None:
        if thoughts:
            raise refuse("messages", "the model writes no reasoning: leave reasoning_content out")
        return content
    opened = prompt.rstrip().endswith(thinking.opening.rstrip())
    if thoughts and not opened:
        thoughts = thinking.opening + thoughts
    if opened or thoughts:
        return f"{thoughts}{thinking.closing}\n\n{content}" if content else thoughts
    return content


def _grammar(model: LoadedModel, conversation: Conversation, text: str) -> Grammar | None:
    """What the reply has to be, compiled once: that finds mistakes, and takes a while."""
    grammar: Grammar | None = None
    if conversation.form is not None:
        field_name, wanted = conversation.form
        if conversation.tools:
            raise refuse(field_name, "does not go with tools", "unsupported_value")
        grammar = model.format.content_grammar(wanted, text)
    elif conversation.must_call:
        grammar = model.format.call_grammar(
            conversation.tools, None, text, several=conversation.several
        )
        if grammar is None:
            message = "the form in which this model calls tools cannot be imposed"
            raise refuse("tool_choice", message, "unsupported_value")
    if grammar is not None:
        grammar.matcher(model.engine.tokenizer)
    return grammar


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
