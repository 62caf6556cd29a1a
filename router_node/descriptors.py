"""How many files, and so connections, this process may have open. Belongs to the process, not to a router in it."""

from __future__ import annotations

import logging
import resource
from typing import Final

_log = logging.getLogger("pdmesh.router")

# For calls over gRPC, nodes, logs and the like.
_OTHER_DESCRIPTORS: Final = 1024


def allow_connections(num_connections: int) -> None:
    """Raises the soft limit of open files as far as that many connections need it and the hard limit lets it."""
    wanted = num_connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning(
            "%d files may be open at a time, %d HTTP connections may need %d", allowed, num_connections, wanted
        )
