"""Where the log lines of child nodes go: the terminal with a name in front, or one file per node.

Implements `child.LogSink`; knows nothing about processes.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.text import Text

_STYLES = {"router": "blue", "prefill": "cyan", "decode": "green", "fused": "magenta"}
_NAME_WIDTH = 10


def style_of(name: str) -> str:
    """Colour of a node by its role."""
    return _STYLES.get(name.split("-", 1)[0], "white")


class ConsoleLogs:
    """Prints every line behind the coloured name of its node."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write_line(self, name: str, line: str) -> None:
        prefix = Text(f"{name:<{_NAME_WIDTH}}| ", style=style_of(name))
        self._console.print(prefix + Text(line, style="default"), soft_wrap=True, highlight=False)


class FileLogs:
    """Writes `<directory>/<name>.log`, anew in every run. A context manager; the files are closed at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def write_line(self, name: str, line: str) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self.directory / f"{name}.log").open("w", encoding="utf-8", buffering=1)
        file.write(f"{line}\n")
