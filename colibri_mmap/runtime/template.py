"""Chat templates: Jinja programs from model files, run in a sandbox with bounded effort.

They see what Hugging Face transformers gives them: `messages`, `tools`, `add_generation_prompt`,
`bos_token`, `eos_token`, `raise_exception`, `strftime_now` and a `tojson` that escapes no HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colibri_mmap.errors import TemplateError
from colibri_mmap.runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]

_MOST_LOOPS = 100_000  # iterations over ranges in one rendering
_LONGEST_TEXT = 50_000_000  # characters

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The first form of [INST] prompts; a system message is folded into the first user message.
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class _Refusal(JinjaError):
    """The template itself called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks training targets; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with products bounded: `'x' * 10**9` must not take all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise JinjaError("powers are not available to chat templates")
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(count, int):
                _check_length(len(text) * count)
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > _LONGEST_TEXT:
        raise JinjaError(f"the rendered text exceeds {_LONGEST_TEXT:,} characters")


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _LimitedRange:
    """`range` for one rendering, which may go round at most `_MOST_LOOPS` times in all."""

    def __init__(self) -> None:
        self._left = _MOST_LOOPS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise JinjaError(f"the template loops more than {_MOST_LOOPS:,} times")
        return numbers


class ChatTemplate:
    """Renders messages to the prompt a model was trained on; `notices` says what was adapted."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Compile `source`; `bos` and `eos` are the texts of the begin and end tokens."""
        self.source = source
        self.notices: list[str] = []
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = _environment().from_string(source)
        except (JinjaError, RecursionError, SyntaxError) as error:
            raise TemplateError(f"the chat template is invalid: {_one_line(error)}") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template `source`, else the model's own, else one that suits its vocabulary."""
        bos, eos = (
            "" if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        if source is None and tokenizer.chat_template is None:
            source, name = _substitute(tokenizer)
            template = cls(source, bos=bos, eos=eos)
            template.notices.append(f"the model has no chat template; {name} is used")
            return template
        return cls(source or tokenizer.chat_template or "", bos=bos, eos=eos)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt for `messages`; `extra` are further variables, such as `tools`.

        A system message that the template refuses or leaves out is put before the first user
        message. Anything else the template refuses is a TemplateError.
        """
        folded = _fold_system(messages)
        try:
            text = self._render(messages, add_generation_prompt, extra)
        except TemplateError as error:
            if folded is None or not isinstance(error.__cause__, _Refusal):
                raise
        else:
            if folded is None or _shows_system(text, messages):
                return text
        text = self._render(folded, add_generation_prompt, extra)
        notice = "the chat template has no system role; the first user message carries it"
        if notice not in self.notices:
            self.notices.append(notice)
        return text

    def _render(self, messages: Sequence[Message], generation: bool, extra: dict[str, Any]) -> str:
        """One rendering, with every failure as a TemplateError."""
        variables = {
            "tools": None,
            "documents": None,
            "range": _LimitedRange(),
            **self._tokens,
            **extra,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": generation,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                _check_length(length)
                pieces.append(piece)
        except _Refusal as error:
            reason = _one_line(error)
            raise TemplateError(f"the chat template refuses these messages: {reason}") from error
        except Exception as error:  # a template is a foreign program: anything may go wrong in it
            raise TemplateError(f"the chat template failed: {_one_line(error)}") from error
        return "".join(pieces)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    line = getattr(error, "lineno", None)
    return f"{text} (line {line})" if line else text


def _substitute(tokenizer: Tokenizer) -> tuple[str, str]:
    """A template for a model without one, and what to call it."""
    if tokenizer.find("<|im_start|>") is not None:
        return CHATML, "ChatML"
    if tokenizer.is_sentencepiece:
        return INST, "the [INST] form"
    return PLAIN, "a plain transcript"


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """`messages` with a leading system message moved into the first user message, if there is."""
    if len(messages) < 2 or messages[0].get("role") != "system":
        return None
    system, first, *others = messages
    texts = (system.get("content"), first.get("content"))
    if first.get("role") != "user" or not all(isinstance(text, str) for text in texts):
        return None
    return [{**first, "content": "\n\n".join(map(str, texts))}, *others]


def _shows_system(text: str, messages: Sequence[Message]) -> bool:
    """Whether the content of a leading system message is in `text`."""
    return str(messages[0]["content"]).strip() in text
