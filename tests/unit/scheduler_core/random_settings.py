"""The settings under which tests play random histories, and the scheduler of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import scheduler_core as sc

from .builders import scheduler_config

MAX_ROWS = 3
MAX_READY_UNGRANTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a history does not change."""

    role: sc.Role
    groups: Sequence[sc.CacheGroupConfig]
    verify_width: int = 1
    overlap_depth: int = 0
    num_host_lcm_blocks: int = 0
    has_storage: bool = False

    def make_scheduler(
        self, chance: random.Random, *, num_lcm_blocks: int, token_budget: int, enable_prefix_events: bool = False
    ) -> sc.Scheduler:
        """With an eviction policy that is drawn."""
        return sc.Scheduler(
            scheduler_config(
                self.role,
                num_lcm_blocks=num_lcm_blocks,
                max_batch_size=MAX_ROWS,
                token_budget=token_budget,
                cache_groups=self.groups,
                max_ready_ungranted=MAX_READY_UNGRANTED,
                verify_width=self.verify_width,
                overlap_depth=self.overlap_depth,
                eviction_policy=chance.choice(list(sc.EvictionPolicy)),
                enable_prefix_events=enable_prefix_events,
                num_host_lcm_blocks=self.num_host_lcm_blocks,
                enable_storage=self.has_storage,
            )
        )


def settings_with(
    group_mixes: Sequence[Sequence[sc.CacheGroupConfig]], *, verify_width: int, host_lcm_blocks: Sequence[int]
) -> st.SearchStrategy[Setting]:
    """Any role; up to `verify_width` tokens verified at a time; storage at most behind a host tier."""
    return st.builds(
        lambda num_host_lcm_blocks, has_storage, **rest: Setting(
            num_host_lcm_blocks=num_host_lcm_blocks, has_storage=has_storage and num_host_lcm_blocks > 0, **rest
        ),
        role=st.sampled_from([sc.Role.FUSED, sc.Role.PREFILL, sc.Role.DECODE]),
        groups=st.sampled_from(group_mixes),
        verify_width=st.sampled_from([1, verify_width]),
        overlap_depth=st.integers(0, 1),
        num_host_lcm_blocks=st.sampled_from(host_lcm_blocks),
        has_storage=st.booleans(),
    )
