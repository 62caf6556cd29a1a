"""The table of metrics in docs/OPERATIONS.md, as those who write queries read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
ROLES = ("router", "prefill", "decode", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedMetric:
    """One metric. `states` are the values of its label `state`, if it has one; `roles` are those of its nodes."""

    name: str
    kind: str
    states: frozenset[str]
    roles: frozenset[str]

    @property
    def prometheus_names(self) -> frozenset[str]:
        """As Prometheus spells it: a histogram is three series."""
        full = self.name.replace(".", "_")
        if "histogram, s" in self.kind:
            return frozenset(f"{full}_seconds_{series}" for series in ("bucket", "count", "sum"))
        if "counter" in self.kind:
            return frozenset((f"{full}_bytes_total" if "bytes" in self.kind else f"{full}_total",))
        return frozenset((full,))


def documented_metrics() -> tuple[DocumentedMetric, ...]:
    """All of them, in the order of the table."""
    section = OPERATIONS.read_text(encoding="utf-8").split("## Metrics\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) ?\| (.*?) \|$", section, re.MULTILINE)
    return tuple(
        DocumentedMetric(name=name, kind=kind, states=_states(labels), roles=_roles(where))
        for names, kind, labels, where in rows
        for name in re.findall(r"`([\w.]+)`", names)
    )


def _states(labels: str) -> frozenset[str]:
    listed = re.search(r"`state`: ([\w, ]+)", labels)
    return frozenset(listed[1].split(", ")) if listed else frozenset()


def _roles(where: str) -> frozenset[str]:
    roles = frozenset(ROLES if where == "all" else where.split(", "))
    assert roles <= set(ROLES), where
    return roles
