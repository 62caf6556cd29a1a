"""The limit of open files is as high as the connections need it, where the system lets it."""

from __future__ import annotations

import logging
import resource

import pytest

from router_node.descriptors import allow_connections

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "is_warned_of"),
    [
        (1024, 1_000_000, 5120, False),
        (1024, UNLIMITED, 5120, False),
        (1024, 2048, 2048, True),
        (5120, 5120, None, False),
        (UNLIMITED, UNLIMITED, None, False),
    ],
)
def test_the_soft_limit_is_raised_no_further_than_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    raised_to: int | None,
    is_warned_of: bool,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    with caplog.at_level(logging.WARNING):
        allow_connections(4096)
    assert raised == ([] if raised_to is None else [(raised_to, hard)])
    assert ("4096 HTTP connections may need 5120" in caplog.text) is is_warned_of
