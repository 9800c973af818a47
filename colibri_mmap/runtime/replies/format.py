"""The format of a model's replies, told from its chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colibri_mmap.runtime.grammar import Grammar
from colibri_mmap.runtime.replies import harmony
from colibri_mmap.runtime.replies.calls import Tool, function_of
from colibri_mmap.runtime.replies.dialects import FAMILIES, THINKING, Family, Thinking
from colibri_mmap.runtime.replies.parser import ReplyParser
from colibri_mmap.runtime.replies.rules import Rules
from colibri_mmap.runtime.tokenizer import Tokenizer

_SPACE = r"/[ \t\r\n]{0,8}/"


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model marks reasoning and tool calls.

    `thinks`: its template speaks of reasoning; else there may be markers for it all the same.
    """

    tokenizer: Tokenizer
    is_harmony: bool
    thinking: Thinking | None
    thinks: bool
    family: Family | None

    @classmethod
    def of(cls, template: str | None, tokenizer: Tokenizer) -> ReplyFormat:
        """The format of a model with this chat template (its source) and vocabulary."""
        source = template or ""
        if "<|channel|>" in source or ("<|message|>" in source and _has(tokenizer, "<|channel|>")):
            return cls(tokenizer, True, None, True, None)
        told = next((pair for pair in THINKING if pair.closing in source), None)
        pairs = (pair for pair in THINKING if _has(tokenizer, pair.opening, pair.closing))
        thinking = told or next(pairs, None)
        families = (
            family for family in FAMILIES if all(text in source for text in family.shown_by)
        )
        return cls(tokenizer, False, thinking, told is not None, next(families, None))

    @property
    def has_calls(self) -> bool:
        """Whether the template tells the model how to call tools."""
        return self.is_harmony or self.family is not None

    def parser(self, prompt: str, tools: Sequence[Tool] | None = None) -> ReplyParser:
        """A parser for the reply to `prompt` (its end is enough); calls are those of `tools`.

        Its text has to be decoded without control tokens, except those in its `shown`.
        """
        return ReplyParser(
            thinking=self.thinking,
            thinks_already=self._thinks_already(prompt),
            dialects=self.family.dialects if self.family else (),
            harmony_prompt=prompt if self.is_harmony else None,
            tools=tools or (),
            shown=self._shown(bool(tools)),
        )

    def content_grammar(self, grammar: Grammar, prompt: str) -> Grammar:
        """`grammar` imposed on what the reply to `prompt` says, after its reasoning."""
        rules = Rules(self.tokenizer)
        if self.is_harmony:
            harmony.content_lead(rules)
        else:
            self._lead(rules, prompt)
        return grammar.after(str(rules))

    def call_grammar(
        self, tools: Sequence[Tool], name: str | None, prompt: str, *, several: bool = True
    ) -> Grammar | None:
        """The reply to `prompt` has to call tools: `name`, or any of them; perhaps `several`.

        None: it cannot be imposed in this format.
        """
        wanted = [tool for tool in tools if name in (None, function_of(tool).get("name"))]
        rules = Rules(self.tokenizer)
        if self.is_harmony:
            rules.add("start", harmony.call_rules(rules, wanted))
        elif self.family is None or not self.family.written.rules(rules, wanted, several):
            return None
        else:
            rules.add("start", f"{self._lead(rules, prompt)} calls")
        return Grammar.lark(str(rules))

    def _thinks_already(self, prompt: str) -> bool:
        opening = self.thinking.opening.rstrip() if self.thinking else ""
        return bool(opening) and prompt.rstrip().endswith(opening)

    def _shown(self, with_tools: bool) -> frozenset[int]:
        texts: list[str] = list(harmony.MARKUP) if self.is_harmony else []
        if self.thinking:
            texts += [self.thinking.opening, self.thinking.closing]
        if self.family and with_tools:
            texts += [text for dialect in self.family.dialects for text in dialect.markup]
        ids = self.tokenizer.encode("".join(texts), add_special=False, parse_special=True)
        control = {token for token in ids if self.tokenizer.is_control(token)}
        return frozenset(control - self.tokenizer.end_ids)

    def _lead(self, rules: Rules, prompt: str) -> str:
        """The rule of what may come before the rest of a reply: white space, reasoning."""
        thinking, already = self.thinking, self._thinks_already(prompt)
        over = thinking is not None and prompt.rstrip().endswith(thinking.closing)
        if thinking is None or over or not (self.thinks or already):
            return rules.add("lead", _SPACE)
        thought = rules.any_text("thought", thinking.closing)
        if already:
            return rules.add("lead", f"{thought} {_SPACE}")
        opening = rules.literal(thinking.opening)
        return rules.add("lead", f"{_SPACE} ({opening} {thought} {_SPACE})?")


def _has(tokenizer: Tokenizer, *texts: str) -> bool:
    """Whether each of `texts` is a token of its own."""
    return all(tokenizer.find(text) is not None for text in texts)
