"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import openai
import pytest

from colibri_mmap import Engine, Sampling
from colibri_mmap.runtime.template import ChatTemplate

USER = [{"role": "user", "content": "Tell me"}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
GREEDY = {"model": "qwen", "temperature": 0, "seed": 1}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "grade": {"enum": ["a", "b"]}},
    "required": ["ok", "grade"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def expected(qwen: Path) -> str:
    """What the engine itself replies."""
    template = (Path(__file__).parent / "tools.jinja").read_text()
    with Engine.open(qwen, threads=2) as engine:
        tokens = engine.chat(
            USER, 24, Sampling(temperature=0), template=ChatTemplate.of(engine.tokenizer, template)
        )
        return "".join(token.text for token in tokens)


def test_a_reply_is_the_engines(client: openai.OpenAI, expected: str) -> None:
    reply = client.chat.completions.create(messages=USER, max_tokens=24, **GREEDY)
    (choice,) = reply.choices
    assert choice.message.content == expected
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24
    assert reply.model == "qwen"
    timings = reply.model_extra["timings"]
    assert timings["predicted_n"] == 24
    assert timings["prompt_n"] + timings["cache_n"] == reply.usage.prompt_tokens
    assert timings["predicted_per_second"] > 0


def test_a_stream_says_the_same(client: openai.OpenAI, expected: str) -> None:
    chunks = list(
        client.chat.completions.create(
            messages=USER,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    *said, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == expected
    assert said[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in said][-1] == "length"
    assert all(chunk.usage is None for chunk in said)
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_no_usage_unless_it_is_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(messages=USER, max_tokens=2, stream=True, **GREEDY)
    )
    assert all(chunk.choices for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_a_conversation_goes_on_from_what_is_known(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "This is the beginning of a long conversation"}]
    first = client.chat.completions.create(messages=asked, max_tokens=12, **GREEDY)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more = [*asked, said, {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(messages=more, max_tokens=4, **GREEDY)
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    # The last token of a reply was chosen, but not read.
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 1
    assert second.usage.prompt_tokens > known


def test_stop_strings_end_a_reply_wherever_tokens_end(client: openai.OpenAI, expected: str) -> None:
    for start in range(1, len(expected) - 3, 3):
        stop = expected[start : start + 3]
        reply = client.chat.completions.create(
            messages=USER, max_tokens=24, stop=[stop, "nowhere to be found"], **GREEDY
        )
        cut = expected[: expected.find(stop)]
        assert reply.choices[0].message.content == cut
        assert reply.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(
            messages=USER, max_tokens=24, stop=stop, stream=True, **GREEDY
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == cut


def test_characters_are_whole_in_a_stream(client: openai.OpenAI) -> None:
    ids = client.post("/../tokenize", body={"content": "é✓𝄞"}, cast_to=object)["tokens"]
    assert len(ids) > 3
    bias = {str(token): 30 for token in set(ids)}
    chunks = list(
        client.chat.completions.create(
            messages=USER, max_tokens=40, logit_bias=bias, stream=True, model="qwen", seed=3
        )
    )
    whole = client.chat.completions.create(
        messages=USER, max_tokens=40, logit_bias=bias, model="qwen", seed=3
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content


def test_several_choices(client: openai.OpenAI, expected: str) -> None:
    reply = client.chat.completions.create(messages=USER, max_tokens=24, n=3, **GREEDY)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {expected}
    assert reply.usage.completion_tokens == 72
    varied = client.chat.completions.create(
        messages=USER, max_tokens=24, n=3, model="qwen", temperature=2, seed=5
    )
    assert len({choice.message.content for choice in varied.choices}) == 3
    again = client.chat.completions.create(
        messages=USER, max_tokens=24, model="qwen", temperature=2, seed=6
    )
    assert again.choices[0].message.content == varied.choices[1].message.content
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        messages=USER, max_tokens=24, n=3, stream=True, **GREEDY
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [expected] * 3


def test_logprobs(client: openai.OpenAI, expected: str) -> None:
    reply = client.chat.completions.create(
        messages=USER, max_tokens=24, logprobs=True, top_logprobs=3, **GREEDY
    )
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == 24
    spelled = b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace")
    assert spelled.replace("\ufffd", "") == expected.replace("\ufffd", "")
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1 + 1e-6
    chunks = client.chat.completions.create(
        messages=USER, max_tokens=24, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [
        token.logprob
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == [token.logprob for token in tokens]


# ------------------------------------------------------------------------------ forms and tools
@pytest.mark.parametrize("seed", range(3))
def test_json_of_a_schema(client: openai.OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(
        model="qwen",
        messages=USER,
        seed=seed,
        temperature=2,
        max_tokens=400,
        extra_body=PLAIN,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "mark", "schema": SCHEMA, "strict": True},
        },
    )
    assert reply.choices[0].finish_reason == "stop"
    document = json.loads(reply.choices[0].message.content)
    assert set(document) == {"ok", "grade"}
    assert isinstance(document["ok"], bool)
    assert document["grade"] in ("a", "b")


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    request = {
        "model": "qwen",
        "messages": USER,
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "seed": 1,
        "extra_body": PLAIN,
    }
    if stream:
        with client.chat.completions.stream(**request) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in (1, 2)
    assert not choice.message.content


def test_a_call_and_its_answer_go_into_the_next_prompt(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    reply = client.chat.completions.create(
        messages=messages, tools=[WEATHER], max_tokens=4, **GREEDY
    )
    assert reply.choices[0].message.content
    asked = [*USER, {"role": "user", "content": "x"}]
    without = client.chat.completions.create(messages=asked, max_tokens=4, **GREEDY)
    assert reply.usage.prompt_tokens > without.usage.prompt_tokens + 100


def test_no_tools_with_the_choice_none(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=USER, max_tokens=4, **GREEDY)
    none = client.chat.completions.create(
        messages=USER, tools=[WEATHER], tool_choice="none", max_tokens=4, **GREEDY
    )
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_thinking_goes_to_reasoning_content(client: openai.OpenAI) -> None:
    request = {
        "messages": USER,
        "max_tokens": 16,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
        **GREEDY,
    }
    message = client.chat.completions.create(**request).choices[0].message
    assert message.content == ""
    thought = message.model_extra["reasoning_content"]
    assert thought
    chunks = list(client.chat.completions.create(stream=True, **request))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.model_extra.get("reasoning_content", "") for d in deltas) == thought
    assert not any(delta.content for delta in deltas)


def test_a_begun_reply_is_continued(client: openai.OpenAI, expected: str) -> None:
    begun = expected[:5]
    reply = client.chat.completions.create(
        messages=[*USER, {"role": "assistant", "content": begun}], max_tokens=4, **GREEDY
    )
    whole = client.chat.completions.create(messages=USER, max_tokens=4, **GREEDY)
    assert reply.usage.prompt_tokens > whole.usage.prompt_tokens
    assert not (reply.choices[0].message.content or "").startswith(begun)


# ------------------------------------------------------------------------------ completions
def test_completions(client: openai.OpenAI) -> None:
    request = {"prompt": "Hello there", "max_tokens": 8, "logprobs": 2, **GREEDY}
    reply = client.completions.create(echo=False, **request)
    (choice,) = reply.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)
    chunks = list(client.completions.create(stream=True, **request))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    offsets = [
        o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == logprobs.text_offset
    echoed = client.completions.create(prompt="Hello there", max_tokens=8, echo=True, **GREEDY)
    assert echoed.choices[0].text == "Hello there" + choice.text


def test_completions_of_ids_and_of_several_prompts(client: openai.OpenAI) -> None:
    both = client.completions.create(prompt=["Hello", [5, 9, 33]], max_tokens=6, n=2, **GREEDY)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    alone = client.completions.create(prompt=[5, 9, 33], max_tokens=6, **GREEDY)
    assert alone.choices[0].text == texts[2]
    assert both.usage.prompt_tokens == 3 + both.usage.total_tokens - 24 - 3
    assert both.usage.completion_tokens == 24


# ------------------------------------------------------------------------------ models
def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["qwen", "mixtral"]
    assert client.models.retrieve("also-qwen").id == "qwen"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"


def test_models_take_turns(client: openai.OpenAI) -> None:
    request = {"messages": USER, "max_tokens": 8, "temperature": 0}
    before = client.chat.completions.create(model="qwen", **request).choices[0].message.content
    other = client.chat.completions.create(model="mixtral", **request).choices[0].message.content
    states = {model.id: model.model_extra["state"] for model in client.models.list()}
    assert states == {"qwen": "unloaded", "mixtral": "loaded"}
    after = client.chat.completions.create(model="also-qwen", **request)
    assert after.choices[0].message.content == before != other
    assert after.model == "also-qwen"
