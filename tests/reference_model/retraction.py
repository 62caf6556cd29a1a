"""Who gives its blocks back when the pool is full, and who gets them."""

from __future__ import annotations

from dataclasses import dataclass

from reference_model.books import Books
from reference_model.coordinator import INDEX
from reference_model.pool import Block, Table
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
class Outcome:
    """`yielding`: chosen, but with results out. `was_local_prefill`: decode role, the grant is the whole round."""

    yielding: Request | None = None
    was_local_prefill: bool = False


def resolve_blocked(current: Round) -> Outcome:
    """When somebody found no memory and no prompt got on, others give way until it fits, nobody is left to give way,
    or it does not join the round for another reason."""
    was_yielding, current.yielding = current.yielding, None
    outcome = Outcome()
    blocked = current.blocked
    if blocked is not None and not (current.prefill_rows or current.plan.remote_prefills):
        # What another one freed with its first step may do.
        fits = blocked.can_decode and grant(current, blocked, outcome) != "blocked"
        if not fits:
            make_room_for(current, blocked, outcome)
    is_alone = current.books.shape.role is Role.DECODE and current.prefill_rows
    if was_yielding is not None and was_yielding is not outcome.yielding and not is_alone:
        current.yielding = outcome.yielding
        current.plan_decodes()
    return outcome


def make_room_for(current: Round, blocked: Request, outcome: Outcome) -> None:
    while True:
        victims = candidates(current.books, includes_secured=False)
        if not victims:
            break
        if would_fit_without_quarantine(current, blocked):
            return
        victim = victims[0]
        if not is_quiescent(current, victim):
            outcome.yielding = victim if victim is not blocked else None
            return
        retract(current, victim)
        if victim is blocked:
            grant_after_giving_way(current, outcome)
            return
        if grant(current, blocked, outcome) != "blocked":
            return
    # The last resort of a round that runs nothing: those whose whole generation is secured give way too.
    while not current.has_work() and not has_anything_out(current.books):
        victims = candidates(current.books, includes_secured=True)
        if not victims:
            return
        retract(current, victims[0])
        current.plan_decodes()
        if current.has_work() or victims[0] is blocked or grant(current, blocked, outcome) != "blocked":
            return


def grant_after_giving_way(current: Round, outcome: Outcome) -> None:
    """The blocked request itself gave way: for the first new prompt, and for decodes."""
    for request in current.books.in_phase(Phase.WAITING)[:1]:
        grant(current, request, outcome)
    if current.books.shape.role is Role.FUSED or not current.prefill_rows:
        current.plan_decodes()


def grant(current: Round, request: Request, outcome: Outcome) -> str:
    """`granted`, `blocked` for want of memory, or `no room` in this round."""
    is_fused = current.books.shape.role is Role.FUSED
    if request.phase in (Phase.PREFILL_DONE, Phase.DECODING):
        if not current.has_place_for_decode():
            return "no room"
        return "granted" if current.plan_decode_row(request) else "blocked"
    if request.phase is Phase.PREFILLING:
        if not current.has_room() or (not is_fused and current.has_work()):
            return "no room"
        outcome.was_local_prefill = current.plan_chunk(request)
        return "granted" if outcome.was_local_prefill else "blocked"
    if not current.books.free_slots():
        return "no room"
    if not request.is_remote and not is_fused and current.has_work():
        current.first_in_line = request
        return "no room"
    if not request.is_remote and not current.has_room():
        return "no room"
    is_granted = current.start_remote_prompt(request) if request.is_remote else current.start_prompt(request)
    if is_granted:
        outcome.was_local_prefill = not request.is_remote
        for older in current.waiting_line():
            older.num_overtakes += older.did_not_fit and comes_before(current.books, older, request)
    return "granted" if is_granted else "blocked"


def comes_before(books: Books, one: Request, other: Request) -> bool:
    return books.requests.index(one) < books.requests.index(other)


def candidates(books: Books, *, includes_secured: bool) -> list[Request]:
    """First to give way first. Incomplete prefills, the longest first; then those that generate: who frees most
    parents, who is shortest, who is youngest. Exempt are those whose whole generation was secured."""
    at = {request.request_id: place for place, request in enumerate(books.requests)}
    residents = [request for request in books.requests if includes_secured or not request.is_secured]
    prefills = [request for request in residents if request.phase is Phase.PREFILLING]
    prefills.sort(key=lambda each: (-len(each.tokens), -at[each.request_id]))
    others = [request for request in residents if request.phase in (Phase.PREFILL_DONE, Phase.DECODING)]
    others.sort(key=lambda each: (-num_releasable(books, each), len(each.tokens), -at[each.request_id]))
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


def is_quiescent(current: Round, request: Request) -> bool:
    """No row of an earlier plan is out; one of this plan was not launched yet."""
    return request.num_results_out == sum(row.request is request for row in current.decode_rows)


def retract(current: Round, victim: Request) -> None:
    """What is computed is published; a row of it in this plan is taken out again."""
    current.books.publish_pending(victim)
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
    request.phase, request.num_results_out = Phase.RETRACTED, 0
    request.is_remote = request.did_not_fit = False


def has_anything_out(books: Books) -> bool:
    """Somebody owes an answer: the runtime a result, or a peer the end of a transfer."""
    return any(request.num_results_out or request.phase in TRANSFERRING for request in books.requests)


def would_fit_without_quarantine(current: Round, blocked: Request) -> bool:
    """Blocks in quarantine come back by themselves: with them, and without all that only the cache holds."""
    books = current.books
    tables = [table for request in books.in_phase(Phase.QUARANTINED) for table in request.tables]
    if not tables:
        return False
    gone = {INDEX, *(table.owner for table in tables)}
    left = [block for block in books.coordinator.pool.taken if not set(block.owners) <= gone]
    return fits_beside(books, left, demand_of(books, blocked))


def demand_of(books: Books, blocked: Request) -> list[int]:
    if blocked.is_resident:
        tokens = books.shape.verify_width
        if blocked.phase is Phase.PREFILLING:
            tokens = blocked.num_prompt_tokens - blocked.num_computed_tokens + books.step_tokens(blocked)
        tables = blocked.tables
    else:
        hit = books.hits_to_try(blocked)[0]
        behind = books.headroom_tokens(blocked)
        if blocked.is_remote:
            behind = max(behind, books.step_tokens(blocked))
        tokens = blocked.num_prompt_tokens - hit.tokens + behind
        tables = [Table("") for _ in books.shape.groups]
    return [
        group.policy.num_fresh_blocks(table.tail_room, tokens)
        for group, table in zip(books.coordinator.groups, tables, strict=True)
    ]


def fits_beside(books: Books, left: list[Block], demand: list[int]) -> bool:
    num_empty = books.shape.num_lcm_blocks - len({block.lcm_block for block in left})
    for group, num_blocks in zip(books.coordinator.groups, demand, strict=True):
        own = [block for block in left if block.group == group.position]
        packing = group.shape.cache_blocks_per_lcm_block
        num_holes = len({block.lcm_block for block in own}) * packing - len(own)
        num_empty -= -(-max(0, num_blocks - num_holes) // packing)
    return num_empty >= 0
