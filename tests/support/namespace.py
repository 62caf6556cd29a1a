"""A network namespace joined to this one by a virtual cable that can be cut without anybody being told.

Needs privileges that not every machine gives; `Namespace.make` says so by returning None.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Nobody's: frames to it are dropped by whoever gets them, as on a switch that lost its table.
_NOBODY = "02:00:00:00:00:01"
_INNER_DEVICE = "pdmesh0"
_NAME_PREFIX = "pdmesh-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One end of the cable; `where` are the words that direct `ip` there."""

    where: tuple[str, ...]
    own: str
    other: str
    device: str


class Namespace:
    """`outer` and `inner` are the addresses of this side of the cable and of the other one."""

    def __init__(self) -> None:
        number = os.getpid()
        self._name = f"{_NAME_PREFIX}{number}"
        self._device = f"pdmesh{number}"[:15]
        # Unlike those of test processes that run at the same time.
        network = f"10.{224 + number // 250 % 8}.{number % 250}"
        self.outer, self.inner = f"{network}.1", f"{network}.2"

    @classmethod
    def make(cls) -> Namespace | None:
        """A namespace with its cable plugged in, or None where the machine does not allow it."""
        if shutil.which("ip") is None:
            return None
        _remove_orphans()
        namespace = cls()
        try:
            namespace._plug_in()
        except subprocess.CalledProcessError:
            namespace.remove()
            return None
        return namespace

    @property
    def prefix(self) -> Sequence[str]:
        """Put before a command, runs it inside."""
        return ("ip", "netns", "exec", self._name)

    def cut(self) -> None:
        """Nothing passes in either direction; connections stay open and hear nothing."""
        for end in self._ends():
            _ip(*end.where, "neigh", "replace", end.other, "lladdr", _NOBODY, "dev", end.device, "nud", "permanent")

    def mend(self) -> None:
        """Everything passes again."""
        for end in self._ends():
            _ip(*end.where, "neigh", "del", end.other, "dev", end.device)

    def remove(self) -> None:
        """With the cable, whatever of them was made."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self._name)

    def _plug_in(self) -> None:
        _ip("netns", "add", self._name)
        _ip("link", "add", self._device, "type", "veth", "peer", "name", _INNER_DEVICE, "netns", self._name)
        for end in self._ends():
            _ip(*end.where, "addr", "add", f"{end.own}/30", "dev", end.device)
            _ip(*end.where, "link", "set", end.device, "up")
        _ip("-n", self._name, "link", "set", "lo", "up")

    def _ends(self) -> tuple[_End, _End]:
        here = _End(where=(), own=self.outer, other=self.inner, device=self._device)
        there = _End(where=("-n", self._name), own=self.inner, other=self.outer, device=_INNER_DEVICE)
        return here, there


def _remove_orphans() -> None:
    """Those of test processes that were killed before they could tidy up."""
    for path in Path("/run/netns").glob(f"{_NAME_PREFIX}*"):
        if not Path("/proc", path.name.removeprefix(_NAME_PREFIX)).exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", path.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
