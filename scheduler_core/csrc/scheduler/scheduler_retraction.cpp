// Who gives way when the pool is full, and to whom.
//
// A request of the decode and fused roles is admitted with some headroom only; when it has used it up, or a
// new prompt does not fit, somebody else gives all of its blocks back and goes on later from a prompt of
// everything it has. The blocks are granted in the plan in which they came free, so that nobody else is asked
// in between.
#include <algorithm>
#include <bit>
#include <utility>

#include "scheduler/retraction.h"
#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

constexpr std::int64_t kFirstReportedStall = 1024;

}  // namespace

// Nobody gives way as long as a prompt gets on: what it ends with is worth waiting for.
void Scheduler::ResolveBlocked(Round& round) {
  const std::optional<std::uint64_t> was_yielding = std::exchange(yielding_, std::nullopt);
  if (round.blocked() != nullptr && !round.has_prefill() && !FitsByNow(round, *round.blocked())) {
    // What a transfer holds comes free by itself and may be all that is missing. Stores that have not begun
    // yet wait in turn, or there might be one under way for ever.
    holds_stores_back_ = coordinator_.has_pinned_store();
    if (!holds_stores_back_ && !coordinator_.has_load()) {
      MakeRoomFor(round, *round.blocked());
    }
  }
  const bool is_alone = config_.role == Role::kDecode && round.num_prefill_rows() > 0;
  if (was_yielding && was_yielding != yielding_ && !is_alone) {
    PlanDecodes(round, 0);  // it need not give way any more
  }
}

// The first step of a younger request may have freed what an older one was looking for.
bool Scheduler::FitsByNow(Round& round, Request& blocked) {
  const bool decodes = HoldingsOf(blocked.state) != nullptr && blocked.phase() != Phase::kPrefilling;
  return blocked.last_plan == num_plans_ || (decodes && Grant(round, blocked) != AdmitOutcome::kBlocked);
}

// Retracts and grants until the blocked request fits, nobody is left, or it does not join for another reason.
void Scheduler::MakeRoomFor(Round& round, Request& blocked) {
  while (num_unsecured_ > 0 && !WouldFitWithoutQuarantine(blocked)) {
    Request* victim = NextVictim(/*includes_secured=*/false);
    if (victim == nullptr) {
      break;
    }
    if (!IsQuiescent(*victim)) {  // nobody who ranks behind it gives way instead
      if (victim != &blocked) {
        yielding_ = victim->submission;
      }
      return;
    }
    RetractVictim(round, *victim);
    if (victim == &blocked) {
      GrantAfterGivingWay(round);
      return;
    }
    if (Grant(round, blocked) != AdmitOutcome::kBlocked) {
      return;
    }
  }
  if (!round.has_work() && !IsAnythingOut()) {
    MakeRoomAtLast(round, blocked);
  }
}

// The last resort of a round that runs nothing: also those give way whose whole generation was secured. What
// they free is for the decodes of the round first.
void Scheduler::MakeRoomAtLast(Round& round, Request& blocked) {
  while (Request* victim = NextVictim(/*includes_secured=*/true)) {
    RetractVictim(round, *victim);
    PlanDecodes(round, 0);
    if (round.has_work() || victim == &blocked || Grant(round, blocked) != AdmitOutcome::kBlocked) {
      return;
    }
  }
}

// The blocked request itself gave way: its blocks are for the first prompt that is new, and for decodes.
void Scheduler::GrantAfterGivingWay(Round& round) {
  const RequestQueue& waiting = QueueOf(Phase::kWaiting);
  const auto first = std::find_if(waiting.begin(), waiting.end(),
                                  [](const Request* request) { return request->phase() == Phase::kWaiting; });
  if (first != waiting.end()) {
    Grant(round, **first);
  }
  if (config_.role == Role::kFused || round.num_prefill_rows() == 0) {
    PlanDecodes(round, 0);
  }
}

Scheduler::AdmitOutcome Scheduler::Grant(Round& round, Request& request) {
  if (HoldingsOf(request.state) == nullptr) {
    const AdmitOutcome outcome = GrantPrompt(round, request);
    if (outcome == AdmitOutcome::kAdmitted) {
      NoteOvertaken(request);
    }
    return outcome;
  }
  if (request.phase() != Phase::kPrefilling) {
    if (!HasRoomForDecode(round, 0)) {
      return AdmitOutcome::kNoRoom;
    }
    return PlanDecodeRow(round, request) ? AdmitOutcome::kAdmitted : AdmitOutcome::kBlocked;
  }
  if (!round.has_room() || (config_.role == Role::kDecode && round.has_work())) {
    return AdmitOutcome::kNoRoom;
  }
  last_round_was_local_prefill_ = PlanChunk(round, request);
  return last_round_was_local_prefill_ ? AdmitOutcome::kAdmitted : AdmitOutcome::kBlocked;
}

// On the decode role a local prompt runs alone; if it may not join the round it is the first in the next.
Scheduler::AdmitOutcome Scheduler::GrantPrompt(Round& round, Request& request) {
  if (!slots_.has_free_slot()) {
    return AdmitOutcome::kNoRoom;
  }
  if (request.is_remote) {
    return AdmitRemote(round, request) ? AdmitOutcome::kAdmitted : AdmitOutcome::kBlocked;
  }
  if (config_.role == Role::kDecode && round.has_work()) {
    first_in_line_ = request.submission;
    return AdmitOutcome::kNoRoom;
  }
  if (!round.has_room()) {
    return AdmitOutcome::kNoRoom;
  }
  const AdmitOutcome outcome = AdmitPrompt(round, request);
  last_round_was_local_prefill_ = outcome == AdmitOutcome::kAdmitted;
  return outcome;
}

// Others gave way to it, so older prompts that are blocked were passed.
void Scheduler::NoteOvertaken(const Request& admitted) {
  for (Request* request : QueueOf(Phase::kWaiting)) {
    if (request->submission > admitted.submission) {
      return;
    }
    request->num_overtakes += request->blocked ? 1 : 0;
  }
}

Request* Scheduler::TakeFirstInLine() {
  const std::optional<std::uint64_t> submission = std::exchange(first_in_line_, std::nullopt);
  const RequestQueue& waiting = QueueOf(Phase::kWaiting);
  const auto found = std::find_if(waiting.begin(), waiting.end(),
                                  [&](const Request* request) { return request->submission == submission; });
  return found == waiting.end() ? nullptr : *found;
}

// Blocks in quarantine come back by themselves, so nobody gives way for what they would satisfy.
bool Scheduler::WouldFitWithoutQuarantine(Request& blocked) {
  const RequestQueue& quarantined = QueueOf(Phase::kQuarantined);
  if (quarantined.empty()) {
    return false;
  }
  std::vector<const std::vector<BlockTable>*> holders;
  for (const Request* request : quarantined) {
    holders.push_back(TablesOf(request->state));
  }
  const Releasable releasable = coordinator_.CountReleasable(holders);
  const Holdings* holdings = HoldingsOf(blocked.state);
  if (holdings == nullptr) {
    const bool is_local = !blocked.is_remote;
    const auto hit_tokens = static_cast<std::int32_t>(Probe(blocked, is_local).hit_tokens);
    return coordinator_.CouldAdmit(LeastDemands(blocked, hit_tokens, is_local), releasable);
  }
  const std::int64_t num_rest_tokens = blocked.num_prompt_tokens - holdings->num_computed_tokens;
  const std::int64_t growth_tokens =
      blocked.phase() == Phase::kPrefilling
          ? num_rest_tokens + capacity_model_.StepTokens(blocked.num_prompt_tokens)
          : DecodeRoomTokens(blocked);
  return coordinator_.CouldSecure(holdings->tables, growth_tokens, releasable);
}

// Those whose admission secured the whole generation are exempt. A request whose last chunk is out is none
// yet.
Request* Scheduler::NextVictim(bool includes_secured) const {
  Request* next = nullptr;
  VictimView next_view{};
  for (const Phase phase : {Phase::kPrefilling, Phase::kDecoding}) {
    for (Request* request : QueueOf(phase)) {
      const Holdings& holdings = *HoldingsOf(request->state);
      if (request->phase() == Phase::kAwaitingResult || (holdings.is_secured && !includes_secured)) {
        continue;
      }
      const bool is_prefill = phase == Phase::kPrefilling;
      const std::vector<BlockTable>* tables = &holdings.tables;
      std::int64_t num_releasable = 0;
      if (!is_prefill) {
        for (const std::int64_t num_lcm_blocks :
             coordinator_.CountReleasable(std::span(&tables, 1)).num_lcm_blocks) {
          num_releasable += num_lcm_blocks;
        }
      }
      const VictimView view{.is_incomplete_prefill = is_prefill,
                            .num_tokens = request->num_tokens(),
                            .num_releasable_lcm_blocks = num_releasable,
                            .submission = request->submission};
      if (next == nullptr || GivesWayBefore(view, next_view)) {
        next = request;
        next_view = view;
      }
    }
    if (next != nullptr) {
      return next;
    }
  }
  return nullptr;
}

// No row of an earlier plan may still write into its blocks or read them. A row of this plan was not
// launched.
bool Scheduler::IsQuiescent(const Request& request) const {
  return request.num_results_out() == (request.last_plan == num_plans_ ? 1 : 0);
}

// What is computed is published, so that it is found again if nobody needs the blocks.
void Scheduler::RetractVictim(Round& round, Request& victim) {
  Holdings& holdings = *HoldingsOf(victim.state);
  PublishSnapshot(victim, holdings);
  round.Withdraw(victim, holdings.tables);
  round.plan().retracted.push_back(victim.request_id);
  ++victim.num_retractions;
  GiveBlocksBack(victim);
}

// Its prompt becomes everything it has; a local prefill of that gives the next token.
void Scheduler::GiveBlocksBack(Request& request) {
  request.Rebase(++num_retractions_);
  SetState(request, std::visit(
                        [](auto& concrete) -> RequestState {
                          if constexpr (requires { Retract(std::move(concrete)); }) {
                            return Retract(std::move(concrete));
                          } else {
                            Ensure(false, "a request that cannot give way was retracted");
                            return Retracted();
                          }
                        },
                        request.state));
}

// Somebody owes an answer: the caller a result, or a peer the end of a transfer.
bool Scheduler::IsAnythingOut() const {
  const auto has_result_out = [this](Phase phase) {
    const RequestQueue& queue = QueueOf(phase);
    return std::any_of(queue.begin(), queue.end(),
                       [](const Request* request) { return request->num_results_out() > 0; });
  };
  const auto is_any = [this](Phase phase) { return !QueueOf(phase).empty(); };
  return is_any(Phase::kAwaitingReady) || is_any(Phase::kRemotePrefilling) || is_any(Phase::kHandingOver) ||
         is_any(Phase::kTransferHeld) || is_any(Phase::kQuarantined) || has_result_out(Phase::kPrefilling) ||
         has_result_out(Phase::kAwaitingResult) || has_result_out(Phase::kDecoding);
}

void Scheduler::CountStall(Plan& plan, bool has_work) {
  if (has_work || !plan.is_empty() || requests_.empty() || IsAnythingOut() || coordinator_.has_transfer()) {
    num_stalled_plans_ = 0;
    return;
  }
  const auto num_stalled = static_cast<std::uint64_t>(++num_stalled_plans_);
  plan.num_stalled_plans =
      num_stalled_plans_ >= kFirstReportedStall && std::has_single_bit(num_stalled) ? num_stalled_plans_ : 0;
}

}  // namespace pdmesh
