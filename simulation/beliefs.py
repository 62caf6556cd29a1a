"""Whether a router is right about its nodes when nothing is under way.

It must count nothing in flight. What it takes for cached must be what the node's scheduler would find, to the token;
where nodes are not followed, nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from router_node.observations import Observations
from router_node.prompt_prefixes import PromptPrefixes
from simulation.compute_hosts import ComputeHost
from simulation.model import PREFIX_GRANULARITY
from simulation.scenario import Request
from simulation.tenants import extra_keys_of


def misbeliefs(
    observations: Observations, hosts: Mapping[str, ComputeHost], requests: Iterable[Request], *, is_told: bool
) -> list[str]:
    """What `observations` have wrong; about caches, with respect to the prompts of these requests. `is_told`: by the
    nodes.
    """
    wrong = [text for host in hosts.values() for text in _miscounted(observations, host)]
    addresses = [host.address for host in hosts.values()]
    for request in requests:
        extra_keys = extra_keys_of(request.tenant)
        keys = PromptPrefixes(request.prompt, extra_keys).keys(PREFIX_GRANULARITY)
        depths = observations.index.find_depths(keys, addresses)
        tokens = np.asarray(request.prompt, dtype=np.int32)
        for host in hosts.values():
            if host.scheduler is None:
                continue
            believed = depths.get(host.address, 0) * PREFIX_GRANULARITY
            cached = host.scheduler.find_cached_tokens(tokens, extra_keys) if is_told else 0
            if believed != cached:
                wrong.append(
                    f"the router takes {believed} tokens of {request.request_id} for cached on {host.name}, where "
                    f"{cached} are"
                )
    return wrong


def _miscounted(observations: Observations, host: ComputeHost) -> Iterator[str]:
    load = observations.load_of(host.address)
    counts = (load.num_requests, load.prefill_tokens, load.memory_tokens)
    if any(counts):
        requests, queued, held = counts
        yield f"the router counts {requests} requests, {queued} queued and {held} held tokens on {host.name}"
