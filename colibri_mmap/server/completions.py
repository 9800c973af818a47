"""POST /v1/completions: text that goes on, without a template."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from colibri_mmap.runtime import generation
from colibri_mmap.runtime.replies.pieces import Content
from colibri_mmap.runtime.stats import Stats
from colibri_mmap.runtime.tokenwriter import Token

from .delivery import Delivery, Ended, PlainText, Reply, Said, Started, Waiting, collected
from .loaded import LoadedModel
from .logprobs import completion_logprobs
from .problems import json_response, refuse
from .schemas import CompletionBody
from .service import service_of
from .streaming import DONE, SILENCE, EventStream, answer, as_event, with_errors
from .usage import timings, usage

router = APIRouter()
_DEFAULT_TOKENS = 16  # as in OpenAI's API: nothing else would end many a text


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """How one or several texts go on, whole or as a stream of server-sent events."""
    service = service_of(request)
    with ExitStack() as stack:
        model = stack.enter_context(await service.hosting.use(body.model))
        prompts = await asyncio.to_thread(_prompts, model, body)
        requests = [
            generation.Request(
                ids=ids,
                max_tokens=body.max_tokens or _DEFAULT_TOKENS,
                sampling=body.sampling(service.sampling, choice),
                logprobs=body.logprobs,
                deadline=service.deadline(),
            )
            for ids in prompts
            for choice in range(body.n)
        ]
        parsers = [PlainText() for _ in requests]
        delivery = Delivery(model.batcher, requests, parsers, service.metrics)
        stack.enter_context(delivery)
        wording = _Wording(model, body, prompts)
        if body.stream:
            return EventStream(with_errors(wording.stream(delivery)), stack.pop_all())
        replies = await answer(request, collected(delivery, len(requests)))
        return json_response(wording.whole(replies))


def _prompts(model: LoadedModel, body: CompletionBody) -> list[list[int]]:
    """Ids of all prompts; control tokens spelled out in a text are what they say."""
    tokenizer = model.engine.tokenizer
    prompts = []
    for number, prompt in enumerate(body.prompt):
        ids = tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise refuse(f"prompt[{number}]", "there is nothing to continue")
        prompts.append(ids)
    return prompts


class _Wording:
    """The wording of one answer."""

    def __init__(
        self, model: LoadedModel, body: CompletionBody, prompts: Sequence[list[int]]
    ) -> None:
        self._tokenizer, self._body = model.engine.tokenizer, body
        self._echoes = [""] * len(prompts)
        if body.echo:
            self._echoes = [
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
                for prompt in body.prompt
            ]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or model.name,
        }

    def whole(self, replies: list[Reply]) -> dict[str, Any]:
        choices = [
            self._choice(
                index,
                self._echoes[index // self._body.n] + reply.content,
                finish=reply.reason,
                logprobs=self._logprobs(reply.tokens, 0),
            )
            for index, reply in enumerate(replies)
        ]
        figures = [reply.stats for reply in replies]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(figures, len(self._echoes)),
            "timings": timings(figures[0]),
        }

    async def stream(self, delivery: Delivery) -> AsyncGenerator[bytes, None]:
        """Chunks; the last one before the end has the usage, if it was asked for."""
        lengths = [0] * (len(self._echoes) * self._body.n)  # of what was said so far
        figures: dict[int, Stats] = {}
        async for news in delivery:
            match news:
                case Started() if echo := self._echoes[news.choice // self._body.n]:
                    yield self._chunk(self._choice(news.choice, echo))
                case Said(piece=Content(text)):
                    logprobs = self._logprobs(news.tokens, lengths[news.choice])
                    lengths[news.choice] += len(text)
                    yield self._chunk(self._choice(news.choice, text, logprobs=logprobs))
                case Ended():
                    figures[news.choice] = news.stats
                    end = self._choice(news.choice, "", finish=news.reason)
                    yield self._chunk(end, timings=timings(news.stats))
                case Waiting():
                    yield SILENCE
        if self._body.stream_options.include_usage:
            in_order = [figures[choice] for choice in sorted(figures)]
            yield self._chunk(usage=usage(in_order, len(self._echoes)))
        yield DONE

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        usage_later = {"usage": None} if self._body.stream_options.include_usage else {}
        return as_event({**self._head, "choices": choices, **usage_later, **more})

    def _choice(
        self,
        index: int,
        text: str,
        *,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return completion_logprobs(self._tokenizer, tokens, offset)
