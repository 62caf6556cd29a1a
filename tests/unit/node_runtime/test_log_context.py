"""Log records are one line each and carry ids."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator

import pytest

from node_runtime.log_context import LineFormatter, bound_request_id, bound_trace_id, call_scope, setup_logging


def line_of(message: str, *args: object, with_exception: bool = False) -> str:
    exc_info = sys.exc_info() if with_exception else None
    record = logging.LogRecord("pdmesh.x", logging.WARNING, __file__, 1, message, args, exc_info)
    return LineFormatter("decode-1").format(record)


def test_a_line_has_time_level_node_ids_logger_and_message() -> None:
    with bound_request_id("r-7"):
        line = line_of("%d blocks", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING decode-1 \[r-7 -\] pdmesh\.x: 3 blocks", line)


def test_a_traceback_stays_on_the_line_of_its_record() -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        line = line_of("failed", with_exception=True)
    assert "KeyError" in line
    assert "\n" not in line


def test_a_client_cannot_forge_lines_or_drive_the_terminal() -> None:
    with bound_request_id("r\nFAKE"):
        line = line_of("name %s", "a\r\n\x1b[31m")
    assert line.endswith("[r\\nFAKE -] pdmesh.x: name a\\r\\n\\x1b[31m")


def test_ids_end_with_their_block() -> None:
    with bound_request_id("outer"):
        with bound_request_id("inner"):
            assert "[inner -]" in line_of("x")
        assert "[outer -]" in line_of("x")
    assert "[- -]" in line_of("x")


def test_how_a_call_ended_is_logged_with_the_ids_it_had() -> None:
    with call_scope():
        with bound_request_id("r-7"), bound_trace_id("t-1"):
            pass
        assert "[r-7 t-1]" in line_of("ended")
        with call_scope():
            assert "[- -]" in line_of("another call")
    assert "[- -]" in line_of("x")


def test_a_generator_that_another_task_closes_ends_its_block_quietly() -> None:
    from contextvars import Context

    def steps() -> Iterator[None]:
        with bound_request_id("r"):
            yield

    generator = steps()
    Context().run(next, generator)
    generator.close()


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_root_logger")
def test_setup_prints_records_of_the_level_and_above_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("node-1", "warning")
    logging.getLogger("pdmesh.a").info("hidden")
    logging.getLogger("pdmesh.a").warning("shown")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "WARNING node-1 [- -] pdmesh.a: shown" in printed
