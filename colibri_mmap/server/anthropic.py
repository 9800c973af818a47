"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from colibri_mmap.runtime import generation
from colibri_mmap.runtime.replies.pieces import (
    Content,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

from .anthropic_messages import conversation
from .anthropic_schemas import CountBody, MessagesBody, Prompting
from .delivery import Call, Delivery, Ended, Reply, Said, Started, Waiting, collected
from .fields import sampling_of
from .loaded import LoadedModel
from .problems import ApiError, encode_json, json_response
from .prompts import ChatPrompt, chat_prompt
from .service import Service, service_of
from .streaming import EventStream, answer

router = APIRouter()
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """A reply to messages, whole or as a stream of server-sent events."""
    service = service_of(request)
    with ExitStack() as stack:
        model = stack.enter_context(await service.hosting.use(body.model))
        prompt = await asyncio.to_thread(_prompt, model, body)
        delivery = stack.enter_context(_submit(service, model, prompt, body))
        wording = _Wording(body.model or model.name, len(prompt.ids))
        if body.stream:
            return EventStream(_with_errors(wording.stream(delivery)), stack.pop_all())
        (reply,) = await answer(request, collected(delivery, 1))
        return json_response(wording.whole(reply))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> Response:
    """How long the prompt of a request is."""
    with ExitStack() as stack:
        model = stack.enter_context(await service_of(request).hosting.use(body.model))
        prompt = await asyncio.to_thread(_prompt, model, body)
        return json_response({"input_tokens": len(prompt.ids)})


def _prompt(model: LoadedModel, body: Prompting) -> ChatPrompt:
    return chat_prompt(model, conversation(body))


def _submit(
    service: Service, model: LoadedModel, prompt: ChatPrompt, body: MessagesBody
) -> Delivery:
    parser = prompt.parser()
    wanted = generation.Request(
        ids=prompt.ids,
        chat_prompt=prompt.text if prompt.is_turn else None,
        max_tokens=body.max_tokens,
        sampling=sampling_of(
            service.sampling,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            stop=tuple(body.stop_sequences),
        ),
        shown=parser.shown,
        grammar=prompt.grammar,
        deadline=service.deadline(),
    )
    return Delivery(model.batcher, [wanted], [parser], service.metrics)


# ------------------------------------------------------------------------------ wording
class _Wording:
    """The wording of one answer."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, reply: Reply) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({**_opened(Reasoning("")), "thinking": reply.reasoning})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call) for call in reply.calls.values()]
        assert reply.end is not None
        usage = self._usage(reply.stats.cached_tokens, reply.stats.generated_tokens)
        return {**self._head, "content": content, **_stop(reply.end), "usage": usage}

    async def stream(self, delivery: Delivery) -> AsyncGenerator[bytes, None]:
        """The events of one message; its content is blocks, one after the other."""
        blocks, open_kind = 0, None
        async for news in delivery:
            match news:
                case Started():
                    yield _event("message_start", message=self._begun(news.cached))
                case Said():
                    kind = _kind(news.piece)
                    if kind != open_kind or isinstance(news.piece, ToolCallStart):
                        if open_kind is not None:
                            yield _event("content_block_stop", index=blocks - 1)
                        block = _opened(news.piece)
                        yield _event("content_block_start", index=blocks, content_block=block)
                        blocks, open_kind = blocks + 1, kind
                    if not isinstance(news.piece, ToolCallStart):
                        delta = _delta(news.piece)
                        yield _event("content_block_delta", index=blocks - 1, delta=delta)
                case Ended():
                    if open_kind is not None:
                        yield _event("content_block_stop", index=blocks - 1)
                    usage = self._usage(news.stats.cached_tokens, news.stats.generated_tokens)
                    yield _event("message_delta", delta=_stop(news), usage=usage)
                    yield _event("message_stop")
                case Waiting():
                    yield _event("ping")

    def _begun(self, cached: int) -> dict[str, Any]:
        end = {"stop_reason": None, "stop_sequence": None}
        return {**self._head, "content": [], **end, "usage": self._usage(cached, 0)}

    def _usage(self, cached: int, generated: int) -> dict[str, int]:
        """What was known from before does not count as input in this API."""
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }


def _stop(end: Ended) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop_string is not None else _STOP_REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _kind(piece: Piece) -> str:
    """The kind of block that a piece belongs to."""
    match piece:
        case Content():
            return "text"
        case Reasoning():
            return "thinking"
        case _:
            return "tool_use"


def _opened(piece: Piece) -> dict[str, Any]:
    """The block that a piece begins, still empty."""
    match piece:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallStart(_, name, call_id):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _delta(piece: Content | Reasoning | ToolCallArguments) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}


def _tool_use(call: Call) -> dict[str, Any]:
    """A call as a block; arguments that are no object are kept as they were written."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        given = call.arguments
    arguments = given if isinstance(given, dict) else {"arguments": given}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode_json({"type": kind, **fields}) + b"\n\n"


async def _with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events; an error among them is the last one."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except ApiError as error:
            document = error.as_anthropic()
            yield b"event: error\ndata: " + encode_json(document) + b"\n\n"
