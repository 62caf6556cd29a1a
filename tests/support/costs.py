"""What each test file costs in processor time: of the process that runs it, and of the processes that it starts.

A part of the run that a change makes slower is seen in the list at its end, also when the machine is busy otherwise.
Knows nothing of what is tested.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

COLLECTION = "(collecting the tests)"
_WORKER_KEY = "cost_s_by_file"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def spent_s(process_id: int | str = "self") -> float:
    """Processor seconds of a process, of its children that have ended, and of all below it that run.

    Source: proc(5), stat and children.
    """
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        children = [child for path in Path(f"/proc/{process_id}/task").glob("*/children") for child in _words_of(path)]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(map(spent_s, children))


def _words_of(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


class FileCosts:
    """A plugin: measures where the file changes, since to look costs some time, too."""

    def __init__(self, num_listed: int) -> None:
        self._num_listed = num_listed
        self._costs_s: Counter[str] = Counter()
        self._last_s = 0.0

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self._charge(COLLECTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._charge(item.nodeid.partition("::")[0])
        return result

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_WORKER_KEY] = json.dumps(self._costs_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self._costs_s.update(json.loads(getattr(node, "workeroutput", {}).get(_WORKER_KEY, "{}")))

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = self._costs_s.total()
        terminalreporter.section(f"processor time by file: {total_s:.0f} s in all")
        for name, cost_s in self._costs_s.most_common(self._num_listed):
            terminalreporter.write_line(f"{cost_s:7.1f} s  {name}")

    def _charge(self, name: str) -> None:
        now_s = spent_s()
        self._costs_s[name] += now_s - self._last_s
        self._last_s = now_s
