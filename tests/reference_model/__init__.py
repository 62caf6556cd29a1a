"""A slow, obvious model of the native scheduler, to compare it with.

It says what the core decides, not how: every question is answered by walking a list, nothing is remembered that could
be asked again, and an admission that failed is simply tried again. So what makes the core fast (indexes, counters,
orders that are kept up to date, remembered failures) has to prove itself. The rules are those of
docs/design/scheduler.md, each in words where it is applied. Knows nothing of the native module.

`group_policies.py` says what the group kinds do differently, `eviction_policies.py` what the eviction policies note;
everything else is common to them. `checks.py` says what must hold whatever was decided.
"""

from reference_model.books import Books
from reference_model.checks import require_sound
from reference_model.group_policies import FullHistory, GroupPolicy, SlidingWindow, State
from reference_model.groups import Key
from reference_model.requests import Phase, Request
from reference_model.scheduler import ReferenceScheduler, RefusedSubmission
from reference_model.transitions import BrokenContract
from reference_model.values import (
    Event,
    EventKind,
    Eviction,
    Gauges,
    GroupKind,
    GroupShape,
    LoadDone,
    Plan,
    Role,
    SchedulerShape,
    StoreDone,
    Submission,
)

__all__ = [
    "Books",
    "BrokenContract",
    "Event",
    "EventKind",
    "Eviction",
    "FullHistory",
    "Gauges",
    "GroupKind",
    "GroupPolicy",
    "GroupShape",
    "Key",
    "LoadDone",
    "Phase",
    "Plan",
    "ReferenceScheduler",
    "RefusedSubmission",
    "Request",
    "Role",
    "SchedulerShape",
    "SlidingWindow",
    "State",
    "StoreDone",
    "Submission",
    "require_sound",
]
