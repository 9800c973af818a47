"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack
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
from colibri_mmap.runtime.stats import Stats

from .delivery import Delivery, Ended, Progress, Reply, Said, Started, Waiting, collected
from .loaded import LoadedModel
from .logprobs import chat_logprobs
from .messages import conversation
from .problems import json_response
from .prompts import ChatPrompt, chat_prompt
from .schemas import ChatBody
from .service import Service, service_of
from .streaming import DONE, SILENCE, EventStream, answer, as_event, with_errors
from .usage import timings, usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """A reply to messages, whole or as a stream of server-sent events."""
    service = service_of(request)
    with ExitStack() as stack:
        model = stack.enter_context(await service.hosting.use(body.model))
        prompt = await asyncio.to_thread(_prompt, model, body)
        delivery = stack.enter_context(_submit(service, model, prompt, body))
        wording = _Wording(model, body)
        if body.stream:
            return EventStream(with_errors(wording.stream(delivery)), stack.pop_all())
        replies = await answer(request, collected(delivery, body.n))
        return json_response(wording.whole(replies))


def _prompt(model: LoadedModel, body: ChatBody) -> ChatPrompt:
    return chat_prompt(model, conversation(body))


def _submit(service: Service, model: LoadedModel, prompt: ChatPrompt, body: ChatBody) -> Delivery:
    parsers = [prompt.parser() for _ in range(body.n)]
    requests = [
        generation.Request(
            ids=prompt.ids,
            chat_prompt=prompt.text if prompt.is_turn else None,
            max_tokens=body.most_tokens,
            sampling=body.sampling(service.sampling, choice),
            logprobs=body.top_logprobs if body.logprobs else None,
            shown=parser.shown,
            grammar=prompt.grammar,
            deadline=service.deadline(),
        )
        for choice, parser in enumerate(parsers)
    ]
    return Delivery(model.batcher, requests, parsers, service.metrics)


class _Wording:
    """The wording of one answer."""

    def __init__(self, model: LoadedModel, body: ChatBody) -> None:
        self._tokenizer, self._body = model.engine.tokenizer, body
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or model.name,
        }

    # -------------------------------------------------------------------------- as a whole
    def whole(self, replies: list[Reply]) -> dict[str, Any]:
        figures = [reply.stats for reply in replies]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, reply) for index, reply in enumerate(replies)],
            "usage": usage(figures),
            "timings": timings(figures[0]),
        }

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.calls.values()
            ]
        logprobs = self._body.logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, reply.tokens) if logprobs else None,
            "finish_reason": reply.reason,
        }

    # -------------------------------------------------------------------------- as a stream
    async def stream(self, delivery: Delivery) -> AsyncGenerator[bytes, None]:
        """Chunks; the last one before the end has the usage, if it was asked for."""
        figures: list[Stats] = []
        async for news in delivery:
            match news:
                case Started():
                    opening = {"role": "assistant", "content": ""}
                    yield self._chunk(_change(news.choice, opening))
                case Progress(_, done, total) if self._body.return_progress:
                    yield self._chunk(prompt_progress={"total": total, "processed": done})
                case Said():
                    yield self._chunk(self._said(news))
                case Ended():
                    figures.append(news.stats)
                    end = _change(news.choice, {}, finish=news.reason)
                    yield self._chunk(end, timings=timings(news.stats))
                case Waiting():
                    yield SILENCE
        if self._body.stream_options.include_usage:
            yield self._chunk(usage=usage(figures))
        yield DONE

    def _said(self, said: Said) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and said.tokens:
            logprobs = chat_logprobs(self._tokenizer, said.tokens)
        return _change(said.choice, _delta(said.piece), logprobs=logprobs)

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        usage_later = {"usage": None} if self._body.stream_options.include_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        return as_event({**head, "choices": choices, **usage_later, **more})


def _change(
    choice: int,
    delta: dict[str, Any],
    *,
    finish: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece of a reply as the change of a message."""
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
