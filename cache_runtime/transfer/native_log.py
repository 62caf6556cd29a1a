"""Keeps the native library's start-up noise off standard error without touching anyone else's output.

The library logs an error line for every engine it makes, although nothing is wrong, and a warning about its own logger
once. Redirecting file descriptor 2 would silence the other threads too, and would leak into a process started in that
moment; raising the threshold of the logging library it bundles (glog) for those calls does neither. Knows only how to
find that threshold; without it nothing is silenced.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# glog's severity threshold as its shared library exports it (`fLI::FLAGS_minloglevel`), and two of its levels.
_THRESHOLD_SYMBOL = "_ZN3fLI17FLAGS_minloglevelE"
_ERROR = 2
_FATAL = 3


@contextmanager
def silenced_native_log() -> Iterator[None]:
    """Only fatal messages are printed inside; the library must be imported already.

    An operator who set MC_LOG_LEVEL to see more than errors sees everything.
    """
    threshold = _find_threshold() if os.environ.get("MC_LOG_LEVEL") == "ERROR" else None
    if threshold is None:
        yield
        return
    threshold.value = _FATAL
    try:
        yield
    finally:
        # The level that MC_LOG_LEVEL stands for, not the one found, which may be another thread's raised one.
        threshold.value = _ERROR


def _find_threshold() -> ctypes.c_int | None:
    """The threshold of the glog that was loaded with the library, None when there is none to be found."""
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if "mooncake" in path and Path(path).name.startswith("libglog"):
                return ctypes.c_int.in_dll(ctypes.CDLL(path), _THRESHOLD_SYMBOL)
    except (OSError, ValueError):
        pass
    return None
