"""What every endpoint works with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from colibri_mmap.runtime.sampling import Sampling

from .hosting import Hosting
from .metrics import Metrics
from .observatory import Observatory


@dataclass(frozen=True, slots=True)
class Service:
    """The models, the books, the view of the experts, and what holds for all replies.

    `timeout` in seconds, None: none.
    """

    hosting: Hosting
    metrics: Metrics
    observatory: Observatory
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)  # where a request does not say

    def deadline(self) -> float | None:
        """When a request that comes now has to be answered, in time.monotonic()."""
        return None if self.timeout is None else time.monotonic() + self.timeout


def service_of(request: Request) -> Service:
    """The service of the application that received the request."""
    service: Service = request.app.state.service
    return service
