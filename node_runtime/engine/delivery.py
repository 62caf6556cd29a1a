"""Brings the engine thread's updates to the event loop: one wake-up per batch, whatever its size."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from node_runtime.engine.loop import Delivery
from node_runtime.prefix_feed import PrefixFeed
from scheduler_core import PrefixKeyChanges

ChangeT = TypeVar("ChangeT")

_log = logging.getLogger(__name__)


def deliver_now(batch: Sequence[Delivery]) -> None:
    """Hands each update to its sink, in order. A sink that raises harms no other."""
    for sink, update in batch:
        try:
            sink(update)
        except Exception:
            _log.exception("an update was not taken: %r", update)


def deliver_on(event_loop: asyncio.AbstractEventLoop) -> Callable[[Sequence[Delivery]], None]:
    """A `deliver` for EngineLoop that hops to `event_loop`. Updates for a loop that is closed are dropped."""

    def deliver(batch: Sequence[Delivery]) -> None:
        try:
            event_loop.call_soon_threadsafe(deliver_now, batch)
        except RuntimeError:
            _log.debug("%d updates came after the event loop was closed", len(batch))

    return deliver


def feed_on(event_loop: asyncio.AbstractEventLoop, feed: PrefixFeed) -> Callable[[PrefixKeyChanges], None]:
    """An `on_prefixes` for EngineLoop that enters what changed into `feed`, which lives on `event_loop`."""

    def enter(changes: PrefixKeyChanges) -> None:
        feed.apply(is_cleared=changes.is_cleared, removed=changes.removed, stored=changes.stored)

    return told_on(event_loop, enter)


def told_on(event_loop: asyncio.AbstractEventLoop, enter: Callable[[ChangeT], None]) -> Callable[[ChangeT], None]:
    """Calls `enter` on `event_loop`, whatever thread it is called on. What comes once that is closed is dropped."""

    def tell(changes: ChangeT) -> None:
        try:
            event_loop.call_soon_threadsafe(enter, changes)
        except RuntimeError:
            _log.debug("prefixes changed after the event loop was closed")

    return tell
