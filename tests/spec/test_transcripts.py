"""Plays the scheduler's transcripts: each names commands and, below dashes, exactly what the core answers.

A transcript is prose (lines that start with `#`) and cases: command lines, a line of four dashes, the expected answer,
an empty line. With PDMESH_REWRITE_TRANSCRIPTS=1 the answers are written anew instead of compared; read the difference
before keeping it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import scheduler_core as sc

TRANSCRIPTS = sorted((Path(__file__).parent / "scheduler").glob("*.txt"))
DASHES = "----"

PLAIN_EVENTS: dict[str, Callable[[str], sc.Event]] = {
    "finish": sc.FinishEvent,
    "abort": sc.AbortEvent,
    "ready": sc.ReadyEvent,
    "granted": sc.GrantedEvent,
    "handed_over": sc.HandedOverEvent,
    "failed": sc.FailedEvent,
    "quiesced": sc.QuiescedEvent,
    "retract": sc.RetractEvent,
}


@dataclass(slots=True)
class Player:
    """Carries commands out on one scheduler. Token ids are written as `5 6 7` or as the range `0..4`."""

    group_ids: list[str] = field(default_factory=list)
    scheduler: sc.Scheduler | None = None
    owed_plans: list[sc.Plan] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # landed tokens, by request
    limits: dict[str, int | None] = field(default_factory=dict)
    keys: dict[sc.StorageKey, str] = field(default_factory=dict)  # their names, in the order they came up

    def play(self, lines: list[str]) -> str:
        answers = [self._answer(line) for line in lines]
        return "\n".join(answer for answer in answers if answer) or "ok"

    def _answer(self, line: str) -> str:
        verb, *words = line.split()
        commands: dict[str, Callable[[list[str]], str]] = {
            "scheduler": self._build,
            "submit": self._submit,
            "plan": self._plan,
            "land": self._land,
            "event": self._event,
            "events": self._events,
            "describe": lambda _: self._core().describe().rstrip("\n"),
            "clear": lambda _: f"cleared={self._core().clear_cache()}",
            "clear_device": lambda _: f"cleared={self._core().clear_device_cache()}",
            "ask_storage": self._ask_storage,
            "storage_has": lambda words: self._say_of_storage(self._core().register_storage_keys, words),
            "storage_lacks": lambda words: self._say_of_storage(self._core().unregister_storage_keys, words),
            "stored": self._stored,
            "loaded": self._loaded,
            "lost": self._lost,
        }
        try:
            return commands[verb](words)
        except (sc.ConfigError, sc.SubmitError, sc.ContractError) as error:
            return f"{type(error).__name__}: {error}"

    def _core(self) -> sc.Scheduler:
        assert self.scheduler is not None, "a transcript starts with `scheduler`"
        return self.scheduler

    def _build(self, words: list[str]) -> str:
        fields = dict(word.split("=", 1) for word in words)
        groups = [group.split(":") for group in fields.pop("groups").split(",")]
        role = sc.Role[fields.pop("role").upper()]
        policy = sc.EvictionPolicy[fields.pop("eviction_policy", "lru").upper()]
        self.group_ids = [name for name, *_ in groups]
        storage = bool(int(fields.pop("enable_storage", "0")))
        config = sc.SchedulerConfig(
            role=role,
            enable_storage=storage,
            eviction_policy=policy,
            cache_groups=[_group_of(*group) for group in groups],
            **{name: _value_of(name, value) for name, value in fields.items()},
        )
        self.scheduler = sc.Scheduler(config)
        self.owed_plans, self.keys = [], {}
        return f"max_request_tokens={self.scheduler.max_request_tokens}"

    def _submit(self, words: list[str]) -> str:
        request_id, *rest = words
        options = [word for word in rest if word.startswith("max_new=") or word == "local"]
        tokens = [token for word in rest if word not in options for token in _tokens_of(word)]
        declared = [int(word.partition("=")[2]) for word in options if word.startswith("max_new=")]
        max_new_tokens = declared[0] if declared else None
        request = sc.RequestSpec(
            request_id=request_id, tokens=tokens, max_new_tokens=max_new_tokens, local_prefill="local" in options
        )
        self._core().submit([request])
        self.sizes[request_id] = len(tokens)
        self.limits[request_id] = None if max_new_tokens is None else len(tokens) + max_new_tokens
        return ""

    def _plan(self, _: list[str]) -> str:
        plan = self._core().next_plan()
        self.owed_plans += [plan] if plan.num_rows else []
        return "\n".join(_lines_of(plan, self.group_ids, self._name_of)) or "(empty)"

    def _land(self, words: list[str]) -> str:
        """The results of all rows since the last time, or of the oldest plan alone: token 1000 + position, and up to
        `tokens=N` of a decode row."""
        most = next((int(word.partition("=")[2]) for word in words if word.startswith("tokens=")), 1)
        num_plans = 1 if "oldest" in words else len(self.owed_plans)
        landing, self.owed_plans = self.owed_plans[:num_plans], self.owed_plans[num_plans:]
        for plan in landing:
            self._core().advance([self._result_of(plan, row, most) for row in range(plan.num_rows)])
        return ""

    def _result_of(self, plan: sc.Plan, row: int, most: int) -> sc.ResultEvent:
        request_id = plan.request_ids[row]
        size, limit = self.sizes[request_id], self.limits[request_id]
        if row < plan.num_prefill_rows:
            num_tokens = int(plan.logits_wanted[row])
        else:
            num_tokens = min(most, int(plan.input_lengths[row]), most if limit is None else limit - size)
        self.sizes[request_id] += num_tokens
        return sc.ResultEvent(request_id, [1000 + size + number for number in range(num_tokens)])

    def _events(self, _: list[str]) -> str:
        """What the prefix cache announces."""
        return "\n".join(map(_line_of_prefix, self._core().drain_prefix_events())) or "(none)"

    def _name_of(self, key: sc.StorageKey) -> str:
        """The group and a number: digests say nothing to a reader."""
        name = self.keys.get(key)
        if name is None:
            group_id = self.group_ids[key.group]
            name = f"{group_id}#{sum(other.group == key.group for other in self.keys) + 1}"
            self.keys[key] = name
        return name

    def _keys_named(self, names: list[str]) -> list[sc.StorageKey]:
        by_name = {name: key for key, name in self.keys.items()}
        return [by_name[name] for name in names]

    def _ask_storage(self, _: list[str]) -> str:
        return " ".join(self._name_of(key) for key in self._core().storage_queries()) or "(nothing)"

    def _say_of_storage(self, say: Callable[[list[sc.StorageKey]], None], words: list[str]) -> str:
        say(self._keys_named(words))
        return ""

    def _stored(self, words: list[str]) -> str:
        """A store is done; storage had not these keys before."""
        self._core().advance([sc.StoreDoneEvent(int(words[0]), self._keys_named(words[1:]))])
        return ""

    def _loaded(self, words: list[str]) -> str:
        self._core().advance([sc.LoadDoneEvent(int(words[0]))])
        return ""

    def _lost(self, words: list[str]) -> str:
        """A load failed, storage has not these keys; the rows of its plan did not run."""
        self.owed_plans.pop()
        self._core().advance([sc.LoadDoneEvent(int(words[0]), False, self._keys_named(words[1:]))])
        return ""

    def _event(self, words: list[str]) -> str:
        name, request_id, *tokens = words
        if name == "done":
            self._core().advance([sc.DoneEvent(request_id, int(tokens[0]))])
            self.sizes[request_id] += 1
        elif name == "result":
            self._core().advance([sc.ResultEvent(request_id, [int(token) for token in tokens])])
            self.sizes[request_id] += len(tokens)
        elif name == "reserve":
            self._core().advance([sc.ReserveEvent(request_id, int(tokens[0]))])
        else:
            self._core().advance([PLAIN_EVENTS[name](request_id)])
        return ""


def _value_of(name: str, value: str) -> int:
    return value == "1" if name.startswith("enable_") else int(value)


def _group_of(name: str, block_granularity: str, packing: str, kind: str = "full") -> sc.CacheGroupConfig:
    """`name:block_granularity:packing`, and `:state` or `:window=N` for groups that do not keep every row."""
    kind, _, window_tokens = kind.partition("=")
    return sc.CacheGroupConfig(
        group_id=name,
        family=sc.Family.STATE if kind == "state" else sc.Family.HISTORY,
        retention=sc.Retention.SLIDING_WINDOW if kind == "window" else sc.Retention.FULL_HISTORY,
        block_granularity=int(block_granularity),
        cache_blocks_per_lcm_block=int(packing),
        sliding_window_tokens=int(window_tokens) if window_tokens else None,
    )


def _tokens_of(word: str) -> range | list[int]:
    first, dots, last = word.partition("..")
    return range(int(first), int(last) + 1) if dots else [int(first)]


def _ids_of(values: list[int]) -> str:
    return " ".join("-" if value == 0 else str(value) for value in values if value >= 0)


def _copies_of(operation: sc.StoreOperation | sc.LoadOperation, name_of: Callable[[sc.StorageKey], str]) -> str:
    copies = zip(operation.copies.tolist(), operation.keys, strict=True)
    return " ".join(f"{name_of(key)}:{source}>{destination}" for (_, source, destination), key in copies)


def _lines_of(plan: sc.Plan, group_ids: list[str], name_of: Callable[[sc.StorageKey], str]) -> Iterator[str]:
    """A plan in the order in which it is carried out."""
    for request_id in plan.finished:
        yield f"finished {request_id}"
    for request_id in plan.retracted:
        yield f"retract {request_id}"
    for admission in plan.admissions:
        tiers = (("host", admission.host_hit_tokens), ("storage", admission.storage_hit_tokens))
        lower = "".join(f" {tier}={num_tokens}" for tier, num_tokens in tiers if num_tokens)
        yield f"admit {admission.request_id} hit={admission.device_hit_tokens}{lower}"
    for store in plan.stores:
        kind = "store" if store.is_pinned else "store ahead"
        yield f"{kind} {store.operation_id} {_copies_of(store, name_of)}"
    for group_id, block_ids in zip(group_ids, plan.zero_blocks, strict=True):
        if len(block_ids):
            yield f"zero {group_id}: {_ids_of(block_ids.tolist())}"
    for load in plan.loads:
        reads = zip(load.keys, load.reads_storage.tolist(), strict=True)
        read = [name_of(key) for key, reads_storage in reads if reads_storage]
        behind = f" reading {' '.join(read)}" if read else ""
        yield f"load {load.operation_id} {_copies_of(load, name_of)}{behind}"
    for grant in plan.remote_prefills:
        parts = zip(group_ids, grant.first_slots, grant.block_ids, strict=True)
        blocks = " ".join(f"{group_id}@{slot}: {_ids_of(ids.tolist())}" for group_id, slot, ids in parts)
        yield f"grant {grant.request_id} from={grant.from_token} {blocks}"
    for handover in plan.handovers:
        yield f"hand over {handover.request_id} token={handover.token}"
    offset = 0
    for row, request_id in enumerate(plan.request_ids):
        begin, length = int(plan.begins[row]), int(plan.input_lengths[row])
        kind = f"prefill of {plan.prefill_lengths[row]}" if row < plan.num_prefill_rows else "decode"
        tokens = plan.token_ids[offset : offset + length].tolist()
        offset += length
        tables = " ".join(
            f"{group_id}: {_ids_of(table[row].tolist())}"
            for group_id, table in zip(group_ids, plan.block_tables, strict=True)
        )
        logits = " logits" if plan.logits_wanted[row] else ""
        out = f" behind {plan.num_results_out[row]}" if plan.num_results_out[row] else ""
        yield f"row {request_id} slot={plan.request_slots[row]} {kind} [{begin},{begin + length}){out}{logits}"
        yield f"  tokens {' '.join('?' if token < 0 else str(token) for token in tokens)} | {tables}"
        yield from _states_of(plan, row, group_ids)


def _line_of_prefix(event: sc.PrefixEvent) -> str:
    match event:
        case sc.PrefixStored():
            parent = "the start" if event.parent_hash is None else f"{event.parent_hash:016x}"
            return f"stored {event.hash:016x} behind {parent}: {' '.join(map(str, event.tokens.tolist()))}"
        case sc.PrefixRemoved():
            return f"removed {event.hash:016x}"
        case sc.PrefixCleared():
            return "cleared"


def _states_of(plan: sc.Plan, row: int, group_ids: list[str]) -> Iterator[str]:
    """The table slots that a row reads its state from and writes it to."""
    parts = [
        f"{group_id}@{'start' if inputs[row] < 0 else inputs[row]} -> @{outputs[row]}"
        for group_id, inputs, outputs in zip(group_ids, plan.state_input_slots, plan.state_output_slots, strict=True)
        if len(inputs)
    ]
    if parts:
        checkpoint = int(plan.checkpoint_tokens[row])
        yield f"  state {' '.join(parts)}" + (f" and a snapshot at {checkpoint}" if checkpoint else "")


def _cases_of(text: str) -> Iterator[tuple[list[str], list[str], str]]:
    """(prose, commands, expected answer) of each block of a transcript."""
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        prose = [line for line in lines if line.startswith("#")]
        rest = lines[len(prose) :]
        if rest:
            cut = rest.index(DASHES)
            yield prose, rest[:cut], "\n".join(rest[cut + 1 :])
        else:
            yield prose, [], ""


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_core_answers_as_the_transcript_says(path: Path) -> None:
    player = Player()
    blocks: list[str] = []
    for prose, commands, expected in _cases_of(path.read_text()):
        answer = player.play(commands) if commands else ""
        blocks.append("\n".join([*prose, *commands, DASHES, answer] if commands else prose))
        if "PDMESH_REWRITE_TRANSCRIPTS" not in os.environ:
            assert answer == expected, f"after: {' / '.join(commands)}"
    if "PDMESH_REWRITE_TRANSCRIPTS" in os.environ:
        path.write_text("\n\n".join(blocks) + "\n")


def test_there_are_transcripts_to_play() -> None:
    roles = {"fused", "prefill_role", "decode_role"}
    topics = {"packing_and_eviction", "sliding_groups", "state_groups", "verify_and_overlap", "prefix_events"}
    topics |= {"retraction", "host_tier", "storage"}
    assert {path.stem for path in TRANSCRIPTS} >= roles | topics
