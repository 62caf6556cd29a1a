"""Who gives its blocks back when the pool is full, and who gets them."""

from __future__ import annotations

from dataclasses import dataclass

from reference_model.books import Books, Outcome
from reference_model.evictions import fits_beside
from reference_model.groups import INDEX
from reference_model.requests import Phase, Request
from reference_model.rounds import Round
from reference_model.values import Role

TRANSFERRING = (
    Phase.AWAITING_READY,
    Phase.REMOTE_PREFILLING,
    Phase.HANDING_OVER,
    Phase.TRANSFER_HELD,
    Phase.QUARANTINED,
)


@dataclass(slots=True)
class Resolution:
    """`yielding`: chosen, but with results out. `was_local_prefill`: decode role, the grant is the whole round."""

    yielding: Request | None = None
    was_local_prefill: bool = False


def resolve_blocked(current: Round) -> Resolution:
    """When somebody found no memory and no prompt got on, others give way until it fits, nobody is left to give way,
    or it does not join the round for another reason."""
    was_yielding, current.yielding = current.yielding, None
    resolution = Resolution()
    blocked = current.blocked
    has_prefill = bool(current.prefill_rows or current.plan.remote_prefills)
    if blocked is not None and not has_prefill and not fits_by_now(current, blocked, resolution):
        # What a transfer holds comes free by itself and may be all that is missing. Stores that did not begin yet wait.
        tiers = current.books.coordinator.tiers
        current.holds_stores_back = tiers is not None and bool(tiers.pinned_stores)
        if tiers is None or not (tiers.pinned_stores or tiers.has_load()):
            make_room_for(current, blocked, resolution)
    is_alone = current.books.shape.role is Role.DECODE and current.prefill_rows
    if was_yielding is not None and was_yielding is not resolution.yielding and not is_alone:
        current.yielding = resolution.yielding
        current.plan_decodes()
    return resolution


def fits_by_now(current: Round, blocked: Request, resolution: Resolution) -> bool:
    """What another one freed with its first step may do, for one that decodes."""
    if has_row(current, blocked):
        return True
    decodes = blocked.is_resident and blocked.phase is not Phase.PREFILLING
    return decodes and grant(current, blocked, resolution) is not Outcome.DOES_NOT_FIT


def make_room_for(current: Round, blocked: Request, resolution: Resolution) -> None:
    while victims := candidates(current.books, includes_secured=False):
        if would_fit_without_quarantine(current.books, blocked):
            return
        victim = victims[0]
        if not is_quiescent(current, victim):
            resolution.yielding = victim if victim is not blocked else None
            return
        retract(current, victim)
        if victim is blocked:
            grant_after_giving_way(current, resolution)
            return
        if grant(current, blocked, resolution) is not Outcome.DOES_NOT_FIT:
            return
    # The last resort of a round that runs nothing: those whose whole generation is secured give way too.
    while not current.has_work() and not has_anything_out(current.books):
        victims = candidates(current.books, includes_secured=True)
        if not victims:
            return
        retract(current, victims[0])
        current.plan_decodes()
        if current.has_work() or victims[0] is blocked:
            return
        if grant(current, blocked, resolution) is not Outcome.DOES_NOT_FIT:
            return


def grant_after_giving_way(current: Round, resolution: Resolution) -> None:
    """The blocked request itself gave way: for the first new prompt, and for decodes."""
    for request in current.books.in_phase(Phase.WAITING)[:1]:
        grant(current, request, resolution)
    if current.books.shape.role is Role.FUSED or not current.prefill_rows:
        current.plan_decodes()


def grant(current: Round, request: Request, resolution: Resolution) -> Outcome:
    """Another try of one that did not fit. Something else than memory may keep it out of this round."""
    may_run_here = current.has_room() and (current.books.shape.role is Role.FUSED or not current.has_work())
    if request.is_resident:
        if request.phase is not Phase.PREFILLING:
            if not current.has_place_for_decode():
                return Outcome.NO_BUDGET
            return Outcome.ADMITTED if current.plan_decode_row(request) else Outcome.DOES_NOT_FIT
        if not may_run_here:
            return Outcome.NO_BUDGET
        outcome = current.plan_chunk(request)
        resolution.was_local_prefill = outcome is Outcome.ADMITTED
        return outcome
    outcome = grant_prompt(current, request, may_run_here=may_run_here)
    if outcome is Outcome.ADMITTED:
        resolution.was_local_prefill = not request.is_remote
        for older in current.waiting_line():
            older.num_overtakes += older.did_not_fit and comes_before(current.books, older, request)
    return outcome


def grant_prompt(current: Round, request: Request, *, may_run_here: bool) -> Outcome:
    """On the decode role a local prompt runs alone; if it may not join the round it is the first in the next."""
    if not current.books.free_slots():
        return Outcome.NO_BUDGET
    if request.is_remote:
        return current.start_remote_prompt(request)
    if current.books.shape.role is Role.DECODE and current.has_work():
        current.first_in_line = request
    return current.start_prompt(request) if may_run_here else Outcome.NO_BUDGET


def comes_before(books: Books, one: Request, other: Request) -> bool:
    return books.requests.index(one) < books.requests.index(other)


def candidates(books: Books, *, includes_secured: bool) -> list[Request]:
    """First to give way first. Incomplete prefills, the longest first; then those that generate: who frees most
    parents, who is shortest, who is youngest. Exempt are those whose whole generation was secured."""
    residents = [request for request in books.requests if includes_secured or not request.is_secured]
    youngest_first = list(reversed(residents))
    prefills = [request for request in youngest_first if request.phase is Phase.PREFILLING]
    prefills.sort(key=lambda each: -len(each.tokens))
    others = [request for request in youngest_first if request.phase in (Phase.PREFILL_DONE, Phase.DECODING)]
    others.sort(key=lambda each: (-num_releasable(books, each), len(each.tokens)))
    return prefills + others


def num_releasable(books: Books, request: Request) -> int:
    """Parents that its tables keep from being free or evictable."""
    pool = books.coordinator.pool
    owner = request.tables[0].owner
    count = 0
    for lcm_block in range(1, pool.num_lcm_blocks + 1):
        children = pool.children_of(lcm_block)
        is_held = any(owner in child.owners for child in children)
        count += is_held and all(set(child.owners) <= {owner, INDEX} for child in children)
    return count


def has_row(current: Round, request: Request) -> bool:
    return request in [row.request for row in current.prefill_rows + current.decode_rows]


def is_quiescent(current: Round, request: Request) -> bool:
    """No row of an earlier plan is out; one of this plan was not launched yet."""
    return len(request.results_out) == int(has_row(current, request))


def retract(current: Round, victim: Request) -> None:
    """What is computed is published; a row of it in this plan is taken out again."""
    current.books.publish_snapshot(victim)
    for row in [row for row in current.decode_rows if row.request is victim]:
        current.decode_rows.remove(row)
        current.num_budget_tokens += current.cost_of_decode()
        for table, zeroed in zip(victim.tables, current.plan.zero_blocks, strict=True):
            zeroed[:] = [block_id for block_id in zeroed if block_id not in table.block_ids()]
    current.plan.retracted.append(victim.request_id)
    victim.num_retractions += 1
    give_blocks_back(current.books, victim)


def give_blocks_back(books: Books, request: Request) -> None:
    """It starts over, here, with a prompt of everything it has."""
    books.release_all(request)
    books.num_retractions += 1
    request.retraction_epoch = books.num_retractions
    request.num_prompt_tokens = len(request.tokens)
    request.phase, request.results_out, request.reserve_tokens = Phase.RETRACTED, [], 0
    request.is_remote = request.did_not_fit = False


def has_anything_out(books: Books) -> bool:
    """Somebody owes an answer: the runtime a result, or a peer the end of a transfer."""
    return any(request.results_out or request.phase in TRANSFERRING for request in books.requests)


def would_fit_without_quarantine(books: Books, blocked: Request) -> bool:
    """Blocks in quarantine come back by themselves: with them, and without all that only the cache holds."""
    tables = [table for request in books.in_phase(Phase.QUARANTINED) for table in request.tables]
    if not tables:
        return False
    gone = {table.owner for table in tables}
    pool, groups = books.coordinator.pool, books.coordinator.groups
    left = [block for block in pool.taken if not set(block.owners) <= {INDEX, *gone}]
    return fits_beside(pool, groups, books.demand_of(blocked, gone), left)
