"""Which prefixes a full cache gives up, under each policy, against a slow and obvious model of the rules.

One group, one block per grain of four tokens. A prompt is written as its grains: 3 stands for four equal tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler_core as sc

from .builders import scheduler_config, spec

GRAIN_TOKENS = 4
MAX_USES = 7
GHOST_STRIDE = 16

Path = tuple[int, ...]  # the grains of a prefix; the last one is the block's own


def prompt_of(grains: Sequence[int]) -> list[int]:
    """The grains and one token more, so that the last grain can be hit."""
    return [grain for grain in grains for _ in range(GRAIN_TOKENS)] + [0]


def build(
    num_blocks: int, policy: sc.EvictionPolicy, *, max_batch_size: int = 4, token_budget: int = 2**20
) -> sc.Scheduler:
    return sc.Scheduler(
        scheduler_config(
            num_lcm_blocks=num_blocks,
            max_batch_size=max_batch_size,
            token_budget=token_budget,
            eviction_policy=policy,
        )
    )


def admit(scheduler: sc.Scheduler, grains: Sequence[int]) -> int:
    """Submits a request and plans it. Gives the number of grains that were hit."""
    scheduler.submit([spec("r", prompt_of(grains), max_new_tokens=1)])
    (admission,) = scheduler.next_plan().admissions
    return admission.device_hit_tokens // GRAIN_TOKENS


def serve(scheduler: sc.Scheduler, grains: Sequence[int]) -> int:
    """The same for a whole request, prefilled in one chunk."""
    num_hits = admit(scheduler, grains)
    scheduler.advance([sc.ResultEvent("r", [9]), sc.FinishEvent("r")])
    scheduler.next_plan()
    return num_hits


def number_after(name: str, scheduler: sc.Scheduler) -> int:
    """A number of the dump, written `name=number`."""
    (word,) = [word for word in scheduler.describe().split() if word.startswith(f"{name}=")]
    return int(word.partition("=")[2])


@dataclass(slots=True)
class Entry:
    value: int
    epoch: int
    uses: int
    is_remembered: bool


@dataclass(slots=True)
class Model:
    """The policy "aged frequency" for requests that come one at a time; with a bonus of 0 nothing but LRU."""

    num_blocks: int
    bonus: int
    level: int = 0
    epoch: int = 0
    entries: dict[Path, Entry] = field(default_factory=dict)
    ghosts: dict[Path, tuple[int, int]] = field(default_factory=dict)  # uses, number
    line: list[tuple[Path, int]] = field(default_factory=list)
    num_remembered: int = 0

    def serve(self, grains: Sequence[int]) -> int:
        prefixes = [tuple(grains[: end + 1]) for end in range(len(grains))]
        num_hits = next((i for i, prefix in enumerate(prefixes) if prefix not in self.entries), len(prefixes))
        self.epoch += 1
        level, uses = self.level, self.uses_for(prefixes, num_hits)
        noted = [
            Entry(level + 1 + self.bonus * uses[i], self.epoch, uses[i], i == len(prefixes) - 1)
            for i in range(len(prefixes))
        ]
        for i in range(num_hits):
            old = self.entries[prefixes[i]]
            noted[i].value = max(noted[i].value, old.value)
            noted[i].is_remembered |= old.is_remembered
            self.entries[prefixes[i]] = noted[i]
        num_fresh = len(prefixes) + 1 - num_hits  # the last one is for the token behind the grains
        while self.num_blocks - len(self.entries) < num_fresh:
            self.evict(set(prefixes[:num_hits]))
        for i in range(num_hits, len(prefixes)):
            self.entries[prefixes[i]] = noted[i]
            self.ghosts.pop(prefixes[i], None)
        return num_hits

    def uses_for(self, prefixes: list[Path], num_hits: int) -> list[int]:
        uses = []
        most = 0
        for i in reversed(range(len(prefixes))):
            if i < num_hits:
                most = max(most, self.entries[prefixes[i]].uses + 1)
            elif prefixes[i] in self.ghosts:
                most = max(most, self.ghosts[prefixes[i]][0] + 1)
            most = min(most, MAX_USES)
            uses.append(most)
        return uses[::-1]

    def evict(self, held: set[Path]) -> None:
        ranks = {
            path: (entry.value, entry.epoch, -len(path)) for path, entry in self.entries.items() if path not in held
        }
        victim = min(ranks, key=ranks.__getitem__)
        assert not any(path[: len(victim)] == victim and path != victim for path in self.entries), "a prefix went first"
        entry = self.entries.pop(victim)
        self.level = max(self.level, entry.value)
        if entry.is_remembered or len(victim) % GHOST_STRIDE == 0:
            self.num_remembered += 1
            self.ghosts[victim] = (entry.uses, self.num_remembered)
            self.line.append((victim, self.num_remembered))
            while len(self.line) > self.num_blocks:
                oldest, number = self.line.pop(0)
                if self.ghosts.get(oldest, (0, 0))[1] == number:
                    del self.ghosts[oldest]


GRAINS = st.lists(st.integers(1, 2), min_size=1, max_size=5)
# Long ones differ early and reach beyond the ghost stride.
LONG = st.tuples(st.integers(3, 5), st.integers(16, 19)).map(lambda pair: [pair[0]] * pair[1])
HISTORIES = st.lists(st.one_of(GRAINS, LONG), min_size=1, max_size=60)


@settings(max_examples=150)
@given(history=HISTORIES, num_blocks=st.integers(20, 30))
def test_aged_frequency_keeps_what_the_model_keeps(history: list[list[int]], num_blocks: int) -> None:
    scheduler, model = build(num_blocks, sc.EvictionPolicy.AGED_FREQUENCY), Model(num_blocks=num_blocks, bonus=2)
    for grains in history:
        assert serve(scheduler, grains) == model.serve(grains)
        assert number_after("entries", scheduler) == len(model.entries)
        assert number_after("level", scheduler) == model.level
        assert number_after("ghosts", scheduler) == len(model.ghosts)


@settings(max_examples=150)
@given(history=HISTORIES, num_blocks=st.integers(20, 30))
def test_without_a_bonus_per_use_the_policy_is_lru(history: list[list[int]], num_blocks: int) -> None:
    scheduler, model = build(num_blocks, sc.EvictionPolicy.LRU), Model(num_blocks=num_blocks, bonus=0)
    for grains in history:
        assert serve(scheduler, grains) == model.serve(grains)
        assert number_after("entries", scheduler) == len(model.entries)


def test_the_histories_tell_the_policies_apart() -> None:
    chance = random.Random(1)
    history = [[chance.choice((1, 1, 1, 2, 3, 4))] * chance.randint(1, 3) for _ in range(300)]
    hits = {}
    for policy in (sc.EvictionPolicy.LRU, sc.EvictionPolicy.AGED_FREQUENCY):
        scheduler = build(6, policy)
        hits[policy] = [serve(scheduler, grains) for grains in history]
    assert hits[sc.EvictionPolicy.LRU] != hits[sc.EvictionPolicy.AGED_FREQUENCY]


PROMPTS = [
    tuple(grains) for grains in ((1, 1), (1, 1, 1, 1), (1, 1, 2), (1, 2, 2, 2, 2), (2,), (2, 2, 1), (3, 3, 3, 3))
]


def play(policy: sc.EvictionPolicy, seed: int, num_moves: int) -> sc.Scheduler:
    """Several requests at a time, computed in chunks, some aborted; at the end none lives."""
    chance = random.Random(seed)
    scheduler = build(12, policy, max_batch_size=3, token_budget=9)
    live: dict[str, bool] = {}  # whether the first token has landed

    def step() -> None:
        plan = scheduler.next_plan()
        events: list[sc.Event] = []
        for request_id, wanted in zip(plan.request_ids, plan.logits_wanted.tolist(), strict=True):
            events.append(sc.ResultEvent(request_id, [9] * wanted))
            live[request_id] = bool(wanted)
        scheduler.advance(events)

    def end(request_id: str) -> None:
        ending = sc.FinishEvent if live.pop(request_id) and chance.random() < 0.9 else sc.AbortEvent
        scheduler.advance([ending(request_id)])

    for number in range(num_moves):
        move = chance.random()
        if move < 0.4:
            scheduler.submit([spec(f"r{number}", prompt_of(chance.choice(PROMPTS)), max_new_tokens=1)])
            live[f"r{number}"] = False
        elif move < 0.8:
            step()
        elif finished := [request_id for request_id, has_landed in live.items() if has_landed]:
            end(chance.choice(finished))
        elif live and move > 0.95:
            end(chance.choice(list(live)))
    while live:
        step()
        for request_id in [request_id for request_id, has_landed in live.items() if has_landed]:
            end(request_id)
    scheduler.next_plan()
    return scheduler


def num_unreachable(policy: sc.EvictionPolicy, seed: int, num_moves: int) -> tuple[int, int]:
    """Cached blocks that no prompt can hit any more, and all cached blocks. Each prompt asks a replay of its own."""
    num_entries = number_after("entries", play(policy, seed, num_moves))
    reachable = set()
    for grains in PROMPTS:
        num_hits = admit(play(policy, seed, num_moves), grains)
        reachable |= {grains[: end + 1] for end in range(num_hits)}
    return num_entries - len(reachable), num_entries


@pytest.mark.parametrize("policy", [sc.EvictionPolicy.LRU, sc.EvictionPolicy.AGED_FREQUENCY])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_moves=st.integers(1, 150))
def test_no_block_outlives_one_it_depends_on(policy: sc.EvictionPolicy, seed: int, num_moves: int) -> None:
    assert num_unreachable(policy, seed, num_moves)[0] == 0


def test_the_histories_fill_the_cache() -> None:
    counts = [num_unreachable(sc.EvictionPolicy.AGED_FREQUENCY, seed, 100)[1] for seed in range(5)]
    assert max(counts) >= 8


def test_a_prompt_in_use_outlives_a_scan_that_lru_loses_it_to() -> None:
    hits = {}
    for policy in (sc.EvictionPolicy.LRU, sc.EvictionPolicy.AGED_FREQUENCY):
        scheduler = build(5, policy)
        for grains in ([1, 1], [1, 1], [2, 2, 2], [3, 3, 3]):  # the second use is worth two turnovers of the rest
            serve(scheduler, grains)
        hits[policy] = serve(scheduler, [1, 1])
    assert hits == {sc.EvictionPolicy.LRU: 0, sc.EvictionPolicy.AGED_FREQUENCY: 1}


def test_a_conversation_that_comes_back_after_its_eviction_is_kept_longer() -> None:
    scheduler = build(5, sc.EvictionPolicy.AGED_FREQUENCY)
    for grains in ([1, 1], [2, 2, 2], [3, 3, 3]):
        serve(scheduler, grains)
    assert number_after("ghosts", scheduler) == 2  # the ends of the first two prompts
    assert serve(scheduler, [1, 1, 1]) == 0  # its ghost makes it worth a use
    serve(scheduler, [4, 4])
    assert serve(scheduler, [1, 1]) == 2


def test_clearing_the_cache_drops_the_ghosts() -> None:
    scheduler = build(5, sc.EvictionPolicy.AGED_FREQUENCY)
    for grain in range(1, 4):
        serve(scheduler, [grain] * 3)
    level = number_after("level", scheduler)
    assert number_after("ghosts", scheduler) > 0
    assert scheduler.clear_cache()
    assert number_after("ghosts", scheduler) == 0
    assert number_after("level", scheduler) == level > 0


def test_the_dump_names_the_policy_that_has_a_state() -> None:
    assert "eviction aged_frequency level=0 ghosts=0\n" in build(5, sc.EvictionPolicy.AGED_FREQUENCY).describe()
    assert "eviction" not in build(5, sc.EvictionPolicy.LRU).describe()
