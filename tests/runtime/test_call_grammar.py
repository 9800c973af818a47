"""A call that has to come: what models write is accepted, and what is drawn can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from replyformats import CASES, TOOLS, Case

from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.grammar import Grammar
from colibri_mmap.runtime.replies import (
    Content,
    Reasoning,
    ReplyFormat,
    ToolCallArguments,
    ToolCallStart,
)
from colibri_mmap.runtime.tokenizer import Tokenizer

MINI = Path(__file__).parents[1] / "data" / "mini"
TOKENIZERS = {
    key: Tokenizer.from_gguf(open_gguf(next((MINI / key).glob("*.gguf"))))
    for key in ("qwen3moe", "gpt-oss", "mixtral")
}
IMPOSED = [case for case in CASES if case.can_be_imposed]
# Tools whose arguments end by themselves when drawn at random, with a reference in the schema.
CLOSED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "parameters": {
                "type": "object",
                "properties": {
                    "direction": {"type": "string", "enum": ["left", "right <b>"]},
                    "angle": {"$ref": "#/$defs/angle"},
                    "fast": {"type": "boolean"},
                },
                "required": ["direction", "angle"],
                "additionalProperties": False,
                "$defs": {"angle": {"type": "integer", "minimum": 1, "maximum": 360}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]


def accepts(grammar: Grammar, tokenizer: Tokenizer, reply: str) -> bool:
    matcher = grammar.matcher(tokenizer)
    ids = tokenizer.encode(reply, add_special=False, parse_special=True, at_start=False)
    return all(map(matcher.accept, ids)) and matcher.complete


@pytest.mark.parametrize("case", IMPOSED, ids=lambda case: case.name)
def test_what_models_write_is_accepted(case: Case) -> None:
    tokenizer = TOKENIZERS[case.model]
    reply_format = ReplyFormat.of(case.template, tokenizer)
    grammar = reply_format.call_grammar(TOOLS, None, case.prompt)
    assert grammar is not None
    assert accepts(grammar, tokenizer, case.reply)
    assert not accepts(grammar, tokenizer, case.reply.replace("weather", "whatever"))
    assert not accepts(grammar, tokenizer, case.reply.replace("city", "town"))
    assert not accepts(grammar, tokenizer, case.reply + " And so on.")
    assert not accepts(grammar, tokenizer, "It rains.")
    only_now = reply_format.call_grammar(TOOLS, "now", case.prompt)
    assert only_now is not None
    assert not accepts(only_now, tokenizer, case.reply)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("case", IMPOSED, ids=lambda case: case.name)
def test_random_tokens_make_calls(case: Case, several: bool) -> None:
    tokenizer = TOKENIZERS[case.model]
    reply_format = ReplyFormat.of(case.template, tokenizer)
    prompt = reply_format.thinking.closing if reply_format.thinking else case.prompt
    grammar = reply_format.call_grammar(CLOSED_TOOLS, None, prompt, several=several)
    assert grammar is not None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in CLOSED_TOOLS}
    ends = sorted(tokenizer.end_ids)
    closing = tokenizer.encode("/<|end|>" if reply_format.is_harmony else "/", add_special=False)
    for seed in range(3):
        random = np.random.default_rng(seed)
        matcher = grammar.matcher(tokenizer)
        parser = reply_format.parser(prompt, CLOSED_TOOLS)
        stream = tokenizer.stream(skip_special=True, at_start=False, shown=parser.shown)
        pieces = []
        for _ in range(900):
            logits = random.standard_normal(tokenizer.vocab_size).astype(np.float32)
            logits[ends] += 1
            logits[closing] += 3
            matcher.mask(logits)
            token = int(logits.argmax())
            assert matcher.accept(token)
            if token in ends:
                break
            pieces += parser.push(stream.push(token))
        pieces += parser.finish()
        assert matcher.complete
        names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
        arguments = [""] * len(names)
        for piece in pieces:
            assert isinstance(piece, ToolCallStart | ToolCallArguments | Reasoning)
            if isinstance(piece, ToolCallArguments):
                arguments[piece.index] += piece.text
        assert names if several else len(names) == 1
        for name, text in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(text), schemas[name])


@pytest.mark.parametrize("case", IMPOSED, ids=lambda case: case.name)
def test_content_is_constrained_behind_reasoning(case: Case) -> None:
    tokenizer = TOKENIZERS[case.model]
    reply_format = ReplyFormat.of(case.template, tokenizer)
    grammar = reply_format.content_grammar(Grammar.regex("yes|no"), case.prompt)
    thinking = reply_format.thinking
    if reply_format.is_harmony:
        lead = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        )
    elif thinking is None or not reply_format.thinks or case.prompt.endswith(thinking.closing):
        lead = ""
    else:
        begun = case.prompt.rstrip().endswith(thinking.opening)
        lead = f"{'' if begun else thinking.opening}Yes or no?{thinking.closing}\n\n"
    assert accepts(grammar, tokenizer, f"{lead}yes")
    assert not accepts(grammar, tokenizer, f"{lead}perhaps")
    parser = reply_format.parser(case.prompt)
    said = [*parser.push(f"{lead}yes"), *parser.finish()]
    assert [piece for piece in said if isinstance(piece, Content)] == [Content("yes")]


def test_where_no_call_can_be_imposed() -> None:
    tokenizer = TOKENIZERS["mixtral"]
    assert ReplyFormat.of("no tools", tokenizer).call_grammar(TOOLS, None, "") is None
    assert ReplyFormat.of("<|tool_call_start|>", tokenizer).call_grammar(TOOLS, None, "") is None
