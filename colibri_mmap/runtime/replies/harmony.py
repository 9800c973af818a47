"""The harmony format of gpt-oss: messages with headers that say for whom they are.

A reply is `<|channel|>analysis<|message|>...<|end|>`, then `<|start|>assistant` and the next
message, and so on. The channel `analysis` is reasoning, `to=functions.name` in a header makes the
message the arguments of a call, the rest is for the reader. Source: OpenAI, "Harmony response
format".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from colibri_mmap.runtime.replies.calls import Calls, Tool, function_of
from colibri_mmap.runtime.replies.pieces import Content, Reasoning
from colibri_mmap.runtime.replies.reader import Markers, Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules, parameters_of

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKUP = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)

_BODY_ENDS = Markers((*_ENDS, _START))
_SOMETHING = Markers((*_ENDS, _START, _CHANNEL))
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def parse_harmony(reader: Reader, calls: Calls, prompt: str) -> Parsing[None]:
    """A whole reply to a prompt that ends within a header or a message."""
    _, started, begun = prompt.rpartition(_START)
    header, in_message, _ = (begun if started else "").partition(_MESSAGE)
    if in_message:
        yield from _message(reader, calls, header)
        header = ""
    while reader.text or not reader.ended:
        if (yield from reader.comes(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, "to=")):
            found = yield from reader.match(_HEADER)
            if found is not None:
                reader.take(found.end())
                yield from _message(reader, calls, f"{header} {found['header']}")
                header = ""
                continue
            yield Content(reader.take(1))
        space = yield from reader.until(_SOMETHING, Content)
        if space is not None:
            yield Content(space)
            yield from _skip_end(reader)


def _message(reader: Reader, calls: Calls, header: str) -> Parsing[None]:
    """The body of a message with this header, and its end."""
    channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
    to = recipient[1] if recipient else ""
    name = to.removeprefix("functions.")
    if calls and (name in calls or name != to):
        yield calls.start(name)
        yield from reader.skip_space()
        yield from reader.until(_BODY_ENDS, calls.arguments)
    else:
        thought = channel is not None and channel[1] == "analysis"
        yield from reader.until(_BODY_ENDS, Reasoning if thought else Content)
    yield from _skip_end(reader)


def _skip_end(reader: Reader) -> Parsing[None]:
    for end in _ENDS:
        if (yield from reader.skip(end)):
            return


def content_lead(rules: Rules) -> str:
    """The rule of what comes before the text for the reader: reasoning, and a header."""
    _reasoning(rules)
    return rules.add("lead", f"reasoning* {rules.literal('<|channel|>final<|message|>')}")


def call_rules(rules: Rules, tools: Sequence[Tool]) -> str:
    """The rule of one call of one of the tools."""
    _reasoning(rules)
    each = []
    for number, function in enumerate(map(function_of, tools)):
        form = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        arguments = rules.json(f"arguments{number}", parameters_of(function))
        body = rules.fill(form, name=rules.literal(function["name"]), arguments=arguments)
        each.append(rules.add(f"call{number}", body))
    return rules.add("calls", f"reasoning* ({' | '.join(each)})")


def _reasoning(rules: Rules) -> None:
    head = rules.literal("<|channel|>analysis<|message|>")
    rules.add("reasoning", f"{head} /(?s:.*)/ {rules.literal('<|end|><|start|>assistant')}")
