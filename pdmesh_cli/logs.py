"""Where the log lines of child nodes go: the terminal with a name in front, or one file per node.

Implements `child.LogSink`; knows nothing about processes.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.text import Text

from node_runtime.errors import BadConfig

_STYLES = {"router": "blue", "prefill": "cyan", "decode": "green", "fused": "magenta"}
_NAME_WIDTH = 10
# What a node writes: time, level, its name, [request id, trace id], logger, message.
_RECORD = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d+Z ([A-Z]+) \S+ \[(\S+) \S+\] \S+: (.*)", re.DOTALL)
_LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_REQUEST_ID_LENGTH = 8
_TRACEBACK = "Traceback (most recent call last):"
_COMPLAINTS = ("ERROR", "CRITICAL")
# Records are single lines: what ends one inside of them is escaped.
_LINE_END = "\\n"
_TRACEBACK = ": Traceback (most recent call last):" + _LINE_END


def last_complaint(lines: Sequence[str]) -> str:
    """The message of the last error that a node logged, of one with a traceback its end; empty where there is none."""
    for line in reversed(lines):
        record = _RECORD.fullmatch(line)
        if record is not None and record.group(2) in _COMPLAINTS:
            message, *rest = record.group(4).split(_TRACEBACK)
            return f"{message}: {rest[0].removesuffix(_LINE_END).rsplit(_LINE_END, 1)[-1]}" if rest else message
    return ""


def style_of(name: str) -> str:
    """Colour of a node by its role."""
    return _STYLES.get(name.split("-", 1)[0], "white")


class ConsoleLogs:
    """Prints every line behind the coloured name of its node: on a terminal what people need of it, else all of it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write_line(self, name: str, line: str) -> None:
        prefix = Text(f"{name:<{_NAME_WIDTH}}| ", style=style_of(name))
        content = _for_people(line) if self._console.is_terminal else Text(line, style="default")
        self._console.print(prefix + content, soft_wrap=True, highlight=False)


def _for_people(line: str) -> Text:
    """The line with the time of day, the level if it matters, the start of the request's name, and the message."""
    record = _RECORD.fullmatch(line)
    if record is None:
        return Text(line, style="default")
    time_of_day, level, request_id, message = record.groups()
    parts = [(f"{time_of_day} ", "bright_black")]
    if level != "INFO":
        parts.append((f"{level} ", _LEVEL_STYLES.get(level, "bright_black")))
    if request_id != "-":
        parts.append((f"[{request_id[:_REQUEST_ID_LENGTH]}] ", "bright_black"))
    if _TRACEBACK in message:
        # A record is one line; people read it in the lines that it had.
        message = message.replace("\\n", "\n  ")
    return Text.assemble(*parts, (message, _LEVEL_STYLES.get(level, "default")))


class FileLogs:
    """Writes `<directory>/<name>.log`, anew in every run. A context manager; the files are closed at its end.

    A file that can no longer be written, as on a full disk, is given up: nodes go on without.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, TextIO] = {}
        self._given_up: set[str] = set()

    def __enter__(self) -> Self:
        """Raises BadConfig when there can be no files."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Asked by writing: root may write where permissions say no, and nobody to a file system that is read-only.
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise BadConfig(f"logs: cannot write under {self.directory}: {reason}; --verbose shows them here") from None
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()

    def write_line(self, name: str, line: str) -> None:
        if name in self._given_up:
            return
        try:
            if name not in self._files:
                self._files[name] = (self.directory / f"{name}.log").open("w", encoding="utf-8", buffering=1)
            self._files[name].write(f"{line}\n")
        except OSError:
            self._given_up.add(name)
