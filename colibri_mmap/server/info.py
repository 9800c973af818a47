"""Endpoints that generate nothing: health, models, metrics, and tokens of a text."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from .hosting import Place
from .problems import json_response, refuse
from .schemas import DetokenizeBody, TokenizeBody
from .service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 once a model could be opened; until then 503, and what it is at."""
    hosting = service_of(request).hosting
    states = {place.spec.name: place.state for place in hosting.places}
    first = hosting.places[0]
    if hosting.ready:
        return json_response({"status": "ok", "models": states})
    if first.state == "failed":
        return json_response({"status": "error", "message": first.error, "models": states}, 503)
    return json_response({"status": "loading", "stage": first.progress, "models": states}, 503)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """All models, open or not."""
    places = service_of(request).hosting.places
    return json_response({"object": "list", "data": [_described(place) for place in places]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One model, by any of its names."""
    if not name:
        return await models(request)
    return json_response(_described(service_of(request).hosting.place(name)))


def _described(place: Place) -> dict[str, Any]:
    """A model as OpenAI lists them, and its state."""
    document: dict[str, Any] = {
        "id": place.spec.name,
        "object": "model",
        "created": place.spec.created,
        "owned_by": "colibri-mmap",
        "aliases": list(place.spec.names[1:]),
        "state": place.state,
    }
    if place.model is not None:
        document["context_length"] = place.model.engine.context_length
    if place.state == "loading":
        document["stage"] = place.progress
    if place.error:
        document["error"] = place.error
    return document


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Ids of a text, as llama.cpp's endpoint of this name gives them."""
    with ExitStack() as stack:
        model = stack.enter_context(await service_of(request).hosting.use(body.model))
        tokenizer = model.engine.tokenizer
        ids = await asyncio.to_thread(
            tokenizer.encode, body.content, body.add_special, body.parse_special
        )
        if not body.with_pieces:
            return json_response({"tokens": ids})
        pieces = [{"id": token, "piece": tokenizer.token_text(token)} for token in ids]
        return json_response({"tokens": pieces})


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of ids."""
    with ExitStack() as stack:
        model = stack.enter_context(await service_of(request).hosting.use(body.model))
        tokenizer = model.engine.tokenizer
        for number, token in enumerate(body.tokens):
            if token >= tokenizer.vocab_size:
                known = f"there are {tokenizer.vocab_size} tokens"
                raise refuse(f"tokens[{number}]", f"{token} is not a token id; {known}")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens)
        return json_response({"content": text})
