"""The requests this router is serving, by id: each id at most once, and no more than a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from node_runtime.errors import DuplicateRequest, QueueFull


class LiveRequests:
    """Lives on the router's event loop."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._request_ids: set[str] = set()

    @property
    def num_live(self) -> int:
        return len(self._request_ids)

    @contextmanager
    def holding(self, request_id: str) -> Iterator[None]:
        """The request is live inside the block. Raises DuplicateRequest or QueueFull."""
        if request_id in self._request_ids:
            raise DuplicateRequest(request_id)
        if len(self._request_ids) >= self._max_live_requests:
            raise QueueFull(f"max_live_requests: this router already serves {self._max_live_requests} requests")
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.remove(request_id)
