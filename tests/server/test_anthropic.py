"""The server as Anthropic's own client sees it."""

from __future__ import annotations

import anthropic
import openai
import pytest

USER = [{"role": "user", "content": "Tell me"}]
GREEDY = {"model": "qwen", "extra_body": {"temperature": 0}}
CLOCK = {
    "name": "clock",
    "description": "Tells the time",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["utc", "cet"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
QUIET = {"thinking": {"type": "disabled"}}


def test_a_reply_is_the_same_by_both_apis(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    theirs = client.chat.completions.create(
        model="qwen", messages=USER, max_tokens=16, temperature=0
    )
    reply = claude.messages.create(messages=USER, max_tokens=16, **GREEDY)
    (block,) = reply.content
    assert block.text == theirs.choices[0].message.content
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 16
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == theirs.usage.prompt_tokens
    with claude.messages.stream(messages=USER, max_tokens=16, **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 16


def test_events_come_in_order(claude: anthropic.Anthropic) -> None:
    stream = claude.messages.create(messages=USER, max_tokens=4, stream=True, **GREEDY)
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=USER, max_tokens=16, **GREEDY).content[0].text
    stop = whole[6:9]
    reply = claude.messages.create(
        messages=USER, max_tokens=16, stop_sequences=["@@@", stop], **GREEDY
    )
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == stop
    assert reply.content[0].text == whole[: whole.find(stop)]


def test_system_blocks_and_results(claude: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "utc"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "9"}],
    }
    cached = {"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Look"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    request = {"system": [cached], "messages": messages, "tools": [CLOCK]}
    counted = claude.messages.count_tokens(model="qwen", **request).input_tokens
    shorter = claude.messages.count_tokens(model="qwen", messages=messages, tools=[CLOCK])
    assert 0 < shorter.input_tokens < counted
    reply = claude.messages.create(max_tokens=2, **request, **GREEDY)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == counted


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_used(claude: anthropic.Anthropic, stream: bool) -> None:
    request = {
        "max_tokens": 300,
        "messages": USER,
        "tools": [CLOCK],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        **QUIET,
        **GREEDY,
    }
    if stream:
        with claude.messages.stream(**request) as events:
            reply = events.get_final_message()
    else:
        reply = claude.messages.create(**request)
    (block,) = reply.content
    assert reply.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert block.name == "clock"
    assert block.id
    assert block.input["zone"] in ("utc", "cet")


def test_thinking_is_a_block_of_its_own(claude: anthropic.Anthropic) -> None:
    request = {
        "messages": USER,
        "max_tokens": 1024 + 8,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        **GREEDY,
    }
    short = {**request, "max_tokens": 8}
    reply = claude.messages.create(**short)
    (block,) = reply.content
    assert block.type == "thinking"
    assert block.thinking
    events = list(claude.messages.create(stream=True, **short))
    assert events[1].content_block.type == "thinking"
    assert {e.delta.type for e in events if e.type == "content_block_delta"} == {"thinking_delta"}
