"""Replies of every family are taken apart as they come, and nothing of them is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replyformats import BAR, CASES, PARIS, TOOLS, Case, called, deepseek

from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.replies import (
    Content,
    Piece,
    Reasoning,
    ReplyFormat,
    ToolCallArguments,
    ToolCallStart,
)
from colibri_mmap.runtime.replies.pieces import joined
from colibri_mmap.runtime.tokenizer import Tokenizer

MINI = Path(__file__).parents[1] / "data" / "mini"
TOKENIZERS = {
    key: Tokenizer.from_gguf(open_gguf(next((MINI / key).glob("*.gguf"))))
    for key in ("qwen3moe", "gpt-oss", "mixtral")
}
FORMATS = {case.name: ReplyFormat.of(case.template, TOKENIZERS[case.model]) for case in CASES}
# What replies are made of, rightly and wrongly put together.
SCRAPS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "<parameter=city>",
    ),
    *("</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *('{"name": "weather", "arguments": {', '"city"', "}", "]", "[", '"', "\\", "\n", " ", "text"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "final", "[TOOL_CALLS]"),
    *("now(", ")", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "functions.now:0", "é"),
    *(deepseek("call begin"), deepseek("sep"), f"<{BAR}DSML{BAR}invoke ", 'name="now">', "weather"),
]


def parse(reply_format: ReplyFormat, prompt: str, parts: Iterable[str]) -> list[Piece]:
    parser = reply_format.parser(prompt, TOOLS)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined([*pieces, *parser.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_family_s_reply(case: Case) -> None:
    assert parse(FORMATS[case.name], case.prompt, [case.reply]) == case.pieces
    assert parse(FORMATS[case.name], case.prompt, case.reply) == case.pieces  # by characters


@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=8))
def test_the_cuts_do_not_matter(case: Case, places: list[int]) -> None:
    assert parse(FORMATS[case.name], case.prompt, cut(case.reply, places)) == case.pieces


@given(
    st.sampled_from(CASES),
    st.lists(st.sampled_from(SCRAPS), max_size=14),
    st.lists(st.integers(0, 10_000), max_size=8),
)
@settings(max_examples=300)
def test_the_cuts_do_not_matter_to_what_is_malformed(
    case: Case, scraps: list[str], places: list[int]
) -> None:
    reply = "".join(scraps)
    whole = parse(FORMATS[case.name], case.prompt, [reply])
    assert parse(FORMATS[case.name], case.prompt, cut(reply, places)) == whole
    assert parse(FORMATS[case.name], case.prompt, reply) == whole


@given(st.lists(st.sampled_from(SCRAPS), max_size=14))
@settings(max_examples=300)
def test_nothing_of_a_reply_without_calls_is_lost(scraps: list[str]) -> None:
    reply = "".join(scraps)
    for case in CASES:
        pieces = parse(FORMATS[case.name], "", [reply])
        if any(not isinstance(piece, Content) for piece in pieces) or case.model == "gpt-oss":
            continue
        (said,) = [piece.text for piece in pieces if isinstance(piece, Content)] or [""]
        thinking = FORMATS[case.name].thinking
        if thinking and reply.lstrip().startswith(thinking.opening):
            continue  # reasoning that turned out empty
        assert said == reply


@given(st.text(), st.text(min_size=1))
def test_reasoning_and_content_are_what_was_written(thought: str, said: str) -> None:
    reply = f"<think>{thought}</think>{said}"
    if "<" in thought + said:
        return
    pieces = parse(ReplyFormat.of("</think>", TOKENIZERS["mixtral"]), "", [reply])
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert (reasoning, content) == (thought.strip(), said.lstrip())


@pytest.mark.parametrize(
    "reply",
    [
        "A <tool_call> is a tag.",
        '<tool_call>{"answer": 42}</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "no JSON"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "argum',
        "<tool_call>\nweather(city)\n</tool_call>\n",
        "  <tool_call>",
        "\n\n",
    ],
)
def test_what_only_looks_like_a_call_is_said(reply: str) -> None:
    reply_format = ReplyFormat.of("<tool_call>", TOKENIZERS["mixtral"])
    assert parse(reply_format, "", reply) == [Content(reply)]


def test_markup_is_text_where_there_are_no_tools() -> None:
    case = next(case for case in CASES if case.name == "hunyuan")
    parser = FORMATS[case.name].parser("", None)
    assert joined([*parser.push(case.reply), *parser.finish()]) == [Content(case.reply)]
    assert parser.calls == 0


@pytest.mark.parametrize(
    "name", ["hermes", "kimi-k2", "mistral, named", "deepseek-v3.1", "gpt-oss", "llama-3"]
)
def test_arguments_come_before_the_call_is_complete(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    parser = FORMATS[name].parser(case.prompt, TOOLS)
    *_, start, arguments = parser.push(case.reply[: case.reply.index("days")])
    assert isinstance(start, ToolCallStart)
    assert isinstance(arguments, ToolCallArguments)
    assert arguments.text.startswith('{"city": "Paris"')
    assert parser.calls == 1


def test_strings_of_xml_forms_come_as_they_are_written() -> None:
    parser = FORMATS["qwen3-coder"].parser("", TOOLS)
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    (piece,) = parser.push('New\n"York')
    assert piece == called(("weather", 'New\\n\\"York'))[1]


def test_a_bare_object_is_a_call_only_of_a_tool_that_exists() -> None:
    for reply in ('{"name": "nothing", "parameters": {}}', '{"city": "Paris"}', "[1, 2]"):
        assert parse(FORMATS["llama-3"], "", reply) == [Content(reply)]
        assert parse(FORMATS["llama-4"], "", reply) == [Content(reply)]


def test_a_cut_call_keeps_what_it_has() -> None:
    reply = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS[:12]}'
    assert parse(FORMATS["hermes"], "", reply) == called(("weather", PARIS[:12]))
    pieces = parse(FORMATS["qwen3-coder"], "", "<function=weather>\n<parameter=city>\nPar")
    assert pieces == called(("weather", '{"city": "Par'))


@given(
    st.dictionaries(
        st.sampled_from(["city", "days", "options", "note", "unknown"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.text('ab1" \n{}\\é<'),
            st.lists(st.integers()),
        ),
        min_size=1,
    )
)
def test_xml_arguments_have_the_types_of_the_schema(arguments: dict[str, object]) -> None:
    """A string stays one; what the schema does not want as a string is read as JSON."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }
    if any("<" in text for text in texts.values()):
        return
    body = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    reply = f'<minimax:tool_call>\n<invoke name="weather">\n{body}</invoke>\n</minimax:tool_call>'
    pieces = parse(FORMATS["minimax-m2"], "", reply)
    found = json.loads("".join(piece.text for piece in pieces[1:]))
    assert found.keys() == arguments.keys()
    for key, value in arguments.items():
        if key == "city" or (key == "note" and value is not None):
            assert found[key] == texts[key]
        elif not isinstance(value, str):
            assert found[key] == value


def test_formats_by_vocabulary() -> None:
    qwen, gpt, mixtral = (TOKENIZERS[key] for key in ("qwen3moe", "gpt-oss", "mixtral"))
    assert ReplyFormat.of(None, qwen).thinking is not None  # the tags are tokens
    assert ReplyFormat.of(None, mixtral).thinking is None
    assert not ReplyFormat.of(None, qwen).has_calls
    gpt_format = ReplyFormat.of(gpt.chat_template, gpt)
    assert gpt_format.is_harmony
    assert gpt_format.has_calls
    assert not ReplyFormat.of(gpt.chat_template, qwen).is_harmony


def test_control_tokens_of_the_format_are_shown() -> None:
    tokenizer = TOKENIZERS["gpt-oss"]
    shown = ReplyFormat.of(tokenizer.chat_template, tokenizer).parser("").shown
    stream = tokenizer.stream(skip_special=True, at_start=False, shown=shown)
    reply = "<|channel|>analysis<|message|>hi<|end|>"
    assert tokenizer.find("<|startoftext|>") not in shown
    ids = tokenizer.encode(reply, add_special=False, parse_special=True)
    assert "".join(map(stream.push, ids)) == reply
    assert not shown & tokenizer.end_ids
