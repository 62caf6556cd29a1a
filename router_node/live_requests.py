"""The requests this router is serving, by id: each id at most once, and no more samples of all than a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from node_runtime.errors import DuplicateRequest, QueueFull, RequestTooLarge


class LiveRequests:
    """Lives on the router's event loop."""

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._num_samples: dict[str, int] = {}

    @property
    def num_live(self) -> int:
        """Samples of live requests."""
        return sum(self._num_samples.values())

    @contextmanager
    def holding(self, request_id: str, num_samples: int = 1) -> Iterator[None]:
        """The request is live inside the block. Raises DuplicateRequest, QueueFull, or RequestTooLarge when it could
        not be served alone.
        """
        if request_id in self._num_samples:
            raise DuplicateRequest(request_id)
        if num_samples > self._max_live_requests:
            raise RequestTooLarge(
                f"num_samples: {num_samples} given, this router serves at most "
                f"max_live_requests={self._max_live_requests} at a time"
            )
        if self.num_live + num_samples > self._max_live_requests:
            raise QueueFull(
                f"max_live_requests: this router serves {self.num_live} requests, {num_samples} more exceed "
                f"{self._max_live_requests}"
            )
        self._num_samples[request_id] = num_samples
        try:
            yield
        finally:
            del self._num_samples[request_id]
