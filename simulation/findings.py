"""What a simulation reports: findings, and a transcript of how they came about."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from node_runtime.log_context import current_request_id

_MAX_FINDINGS = 50
# Compute nodes say there what they are made of.
_SELF_DESCRIPTIONS = ("prefill_node.server", "decode_node.server")


class Timekeeper(Protocol):
    """Tells the time of the simulation."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A promise that was broken. `kind` is one of a few names, by which runs are compared."""

    kind: str
    text: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.at_s:9.4f} {self.kind}: {self.text}"


class Journal:
    """Findings, and lines of the transcript when `is_verbose`."""

    def __init__(self, time: Timekeeper, *, is_verbose: bool) -> None:
        self._time = time
        self.is_verbose = is_verbose
        self.findings: list[Finding] = []
        # What a run has been through, by name: whether the simulator gets anywhere.
        self.seen: Counter[str] = Counter()
        # Processes that the scenario breaks in a way that they themselves must take for a defect.
        self.excused: set[str] = set()
        self.lines: list[str] = []
        self._is_closed = False

    def close(self) -> None:
        """The run is over: how its processes end says nothing about them."""
        self._is_closed = True

    @property
    def now_s(self) -> float:
        return self._time.now_s

    def note(self, who: str, text: Callable[[], str]) -> None:
        """One line of the transcript; `text` is asked only when somebody will read it."""
        if self.is_verbose:
            self.lines.append(f"{self._time.now_s:9.4f} {who:<10} {text()}")

    def count(self, what: str) -> None:
        """Something happened that not every run sees."""
        self.seen[what] += 1

    def find(self, kind: str, text: str) -> None:
        if len(self.findings) < _MAX_FINDINGS and not self._is_closed:
            finding = Finding(kind=kind, text=text, at_s=self._time.now_s)
            self.findings.append(finding)
            self.note("FINDING", lambda: f"{kind}: {text}")


class JournalHandler(logging.Handler):
    """Log records of the nodes: a traceback or a critical one is a finding, others belong to the transcript.

    What all is well with is left out of it: the start of the mesh, and what each node is made of.
    """

    def __init__(self, journal: Journal, process_name: Callable[[], str], *, begins_at_s: float) -> None:
        """`begins_at_s`: when the mesh has started."""
        super().__init__(logging.INFO if journal.is_verbose else logging.ERROR)
        self._begins_at_s = begins_at_s
        self._journal = journal
        self._process_name = process_name

    @override
    def emit(self, record: logging.LogRecord) -> None:
        name, text = self._process_name(), record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        is_defect = error is not None or record.levelno >= logging.CRITICAL
        if is_defect and name not in self._journal.excused:
            self._journal.find("log", f"{name}: {text}" + ("" if error is None else f": {error!r}"))
        elif record.levelno > logging.INFO or not self._is_preliminary(record):
            request_id = current_request_id()
            about = f" {request_id}" if request_id and request_id not in text else ""
            self._journal.note(name, lambda: f"log{about}: {text}")

    def _is_preliminary(self, record: logging.LogRecord) -> bool:
        return record.name in _SELF_DESCRIPTIONS or self._journal.now_s < self._begins_at_s
