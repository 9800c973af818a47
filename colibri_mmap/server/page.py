"""The page at `/`, and what it shows besides the conversation."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from .observatory import described
from .problems import json_response
from .service import service_of
from .streaming import EventStream, with_errors

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page itself: one file, which fetches nothing from elsewhere."""
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(text, media_type="text/html", headers=headers)


@router.get("/api/state")
async def state(request: Request, model: str = "") -> Response:
    """What does not change while a model is open: sizes, geometry, memory."""
    return json_response(described(service_of(request).hosting.place(model)))


@router.get("/api/events")
async def events(request: Request, model: str = "") -> Response:
    """What the experts of a model do: server-sent events, as long as somebody listens."""
    service = service_of(request)
    service.hosting.place(model)  # a 404 before the stream begins
    return EventStream(with_errors(service.observatory.events(model)), nullcontext())


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a policy that allows its own script and styles and nothing else."""
    content = (Path(__file__).parent / "page.html").read_bytes()
    allowed = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'"
            for body in re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), content, re.DOTALL)
        )
        for tag in (b"script", b"style")
    }
    return content, (
        f"default-src 'none'; script-src {allowed[b'script']}; style-src {allowed[b'style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
