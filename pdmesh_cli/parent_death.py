"""Ties a child node to the life of the process that supervises it.

The child asks the kernel itself: running code between fork and exec in a parent with gRPC threads is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID_VARIABLE = "PDMESH_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Arranges that this process is killed when its supervisor is gone; nothing without a supervisor.

    Exits at once when the supervisor died before the arrangement was made.
    """
    parent_pid = os.environ.get(PARENT_PID_VARIABLE)
    if parent_pid is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if str(os.getppid()) != parent_pid:
        sys.exit(f"the supervising process {parent_pid} is gone")
