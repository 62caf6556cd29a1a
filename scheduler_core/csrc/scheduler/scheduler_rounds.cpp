// The planning half of the scheduler: which requests make up the next plan.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

// How often younger prompts may pass an older one that does not fit. Then the line waits for it: memory that
// comes free goes to the oldest, so a large prompt is not starved by a stream of small ones.
constexpr std::int32_t kMaxOvertakes = 64;

// The line of new prompts in one round.
class AdmissionLine {
 public:
  // Whether the line goes on behind a prompt that did not fit.
  bool PassBlocked(Request& request) {
    blocked_.push_back(&request);
    return request.num_overtakes < kMaxOvertakes;
  }

  void NoteAdmitted() {
    for (Request* request : blocked_) {
      ++request->num_overtakes;
    }
  }

 private:
  std::vector<Request*> blocked_;
};

}  // namespace

Plan Scheduler::NextPlan() {
  ++num_plans_;
  Round round(row_layout_, config_.max_batch_size, config_.token_budget);
  ListFinished(round);
  switch (config_.role) {
    case Role::kPrefill:
      PlanHandovers(round);
      PlanPrefills(round);
      break;
    case Role::kDecode:
      PlanDecodeRole(round);
      break;
    case Role::kFused:
      PlanFused(round);
      break;
  }
  if (config_.role != Role::kPrefill) {
    ResolveBlocked(round);
  }
  StartTransfers(round);
  CountStall(round.plan(), round.has_work());
  return std::move(round).Build();
}

void Scheduler::ListFinished(Round& round) {
  for (const Request* request : std::exchange(QueueOf(Phase::kFinished), {})) {
    round.plan().finished.push_back(request->request_id);
    requests_.erase(requests_.find(request->request_id));
  }
}

void Scheduler::PlanHandovers(Round& round) {
  const RequestQueue landed = QueueOf(Phase::kPrefillDone);
  for (Request* request : landed) {
    PublishPending(*request, *HoldingsOf(request->state), PrefillStoreScope());
    round.plan().handovers.push_back({.request_id = request->request_id, .token = request->tokens.back()});
    SetState(*request, StartHandover(std::get<PrefillDone>(std::move(request->state))));
  }
}

// Decodes first, so that a long prompt cannot starve them. What a chunk needs to get anywhere is left to it;
// what it does not use goes to further decodes.
void Scheduler::PlanFused(Round& round) {
  const std::int32_t num_spared_tokens = SparedTokens();
  PlanDecodes(round, num_spared_tokens);
  PlanPrefills(round);
  if (num_spared_tokens > 0) {
    PlanDecodes(round, 0);
  }
}

// The budget that decodes leave to a prompt: a grain beside a state group, whose chunks end on grain
// boundaries; beside a replayable one a window that is fed again, and a chunk behind it that may be the last.
std::int32_t Scheduler::SparedTokens() const {
  if ((!row_layout_.has_state && chunk_rules_.replay_window_tokens == 0) || !HasPrefillToRun()) {
    return 0;
  }
  return row_layout_.has_state ? config_.prefix_granularity
                               : chunk_rules_.replay_window_tokens +
                                     std::max(chunk_rules_.replay_window_tokens, config_.prefix_granularity);
}

bool Scheduler::HasPrefillToRun() const {
  const RequestQueue& resident = QueueOf(Phase::kPrefilling);
  if (!resident.empty()) {
    return CanTakeRow(**resident.begin());
  }
  if (const Request* readmission = NextReadmission()) {
    return slots_.has_free_slot() && !IsStillBlocked(*readmission, /*is_local=*/true);
  }
  const RequestQueue& waiting = QueueOf(Phase::kWaiting);
  return slots_.has_free_slot() &&
         std::any_of(waiting.begin(), waiting.end(), [this](const Request* request) {
           return !request->IsComplete() && !IsStillBlocked(*request, /*is_local=*/true);
         });
}

// One that finds no memory does not stop the others.
void Scheduler::PlanDecodes(Round& round, std::int32_t num_spared_tokens) {
  for (Request* request : QueueOf(Phase::kDecoding)) {
    if (!HasRoomForDecode(round, num_spared_tokens)) {
      return;
    }
    if (DecodeWidth(*request) > 0 && request->submission != yielding_) {
      PlanDecodeRow(round, *request);
    }
  }
}

// Beside the prompts of the decode role, which run elsewhere or alone, decodes cost nothing.
std::int32_t Scheduler::DecodeCostTokens() const {
  return config_.role == Role::kFused ? config_.verify_width : 0;
}

bool Scheduler::HasRoomForDecode(const Round& round, std::int32_t num_spared_tokens) const {
  return round.num_free_rows() > 0 && round.num_budget_tokens() - num_spared_tokens >= DecodeCostTokens();
}

// What holds blocks comes before what ran before, and that before what is new.
void Scheduler::PlanPrefills(Round& round) {
  if (PlanResidentChunks(round) && PlanReadmission(round) && NextReadmission() == nullptr) {
    PlanNewPrompts(round);
  }
}

// At most one in a round. False when it leaves its prompt incomplete.
bool Scheduler::PlanReadmission(Round& round) {
  Request* readmission = config_.role == Role::kFused ? NextReadmission() : nullptr;
  if (readmission == nullptr || !round.has_room() || !slots_.has_free_slot()) {
    return true;
  }
  return AdmitPrompt(round, *readmission) != AdmitOutcome::kAdmitted ||
         readmission->phase() != Phase::kPrefilling;
}

// False when a prompt is left incomplete: nothing younger is prefilled before it.
bool Scheduler::PlanResidentChunks(Round& round) {
  RequestQueue& resident = QueueOf(Phase::kPrefilling);
  for (auto next = resident.begin(); next != resident.end();) {
    Request& request = **next++;
    if (!CanTakeRow(request) || !round.has_room()) {
      return false;
    }
    if (!PlanChunk(round, request) || request.phase() == Phase::kPrefilling) {
      return false;
    }
  }
  return true;
}

// Where retracted requests are not readmitted first they stand here too, in the place of their submission.
void Scheduler::PlanNewPrompts(Round& round) {
  if (round.is_sealed()) {
    return;
  }
  AdmissionLine line;
  RequestQueue& waiting = QueueOf(Phase::kWaiting);
  for (auto next = waiting.begin(); next != waiting.end();) {
    Request& request = **next++;
    const bool may_start =
        config_.role != Role::kPrefill || num_ready_ungranted_ < config_.max_ready_ungranted;
    if (!round.has_room() || !slots_.has_free_slot() || !may_start) {
      return;
    }
    if (request.IsComplete()) {
      continue;
    }
    const AdmitOutcome outcome = AdmitPrompt(round, request);
    if (outcome == AdmitOutcome::kNoRoom) {
      return;
    }
    if (outcome == AdmitOutcome::kAdmitted) {
      line.NoteAdmitted();
      if (request.phase() == Phase::kPrefilling) {
        return;
      }
    } else if (!line.PassBlocked(request)) {
      return;
    }
  }
}

// A local prefill has its round to itself. It takes turns with decodes and remote admissions, so that a long
// prompt cannot starve them.
void Scheduler::PlanDecodeRole(Round& round) {
  const bool is_turn_of_others = std::exchange(last_round_was_local_prefill_, false);
  if (!is_turn_of_others && PlanOneLocalPrefill(round)) {
    last_round_was_local_prefill_ = true;
    return;
  }
  PlanDecodes(round, 0);
  if (NextReadmission() == nullptr) {  // what ran before comes before what is new
    PlanRemoteAdmissions(round);
  }
  if (is_turn_of_others && !round.has_work()) {
    last_round_was_local_prefill_ = PlanOneLocalPrefill(round);
  }
}

bool Scheduler::PlanOneLocalPrefill(Round& round) {
  const RequestQueue& resident = QueueOf(Phase::kPrefilling);
  if (!resident.empty()) {
    Request& oldest = **resident.begin();
    return CanTakeRow(oldest) && PlanChunk(round, oldest);
  }
  if (!slots_.has_free_slot()) {
    return false;
  }
  if (Request* first = TakeFirstInLine()) {
    return AdmitPrompt(round, *first) == AdmitOutcome::kAdmitted;
  }
  if (Request* readmission = NextReadmission()) {
    return AdmitPrompt(round, *readmission) == AdmitOutcome::kAdmitted;
  }
  if (round.is_sealed()) {
    return false;
  }
  AdmissionLine line;
  const RequestQueue& waiting = QueueOf(Phase::kWaiting);
  for (auto next = waiting.begin(); next != waiting.end() && slots_.has_free_slot();) {
    Request& request = **next++;
    if (!request.is_remote && AdmitPrompt(round, request) == AdmitOutcome::kAdmitted) {
      line.NoteAdmitted();
      return true;
    }
    if (request.blocked && !line.PassBlocked(request)) {
      return false;
    }
  }
  return false;
}

// A retracted request whose return is cheap, or that a peer cannot prefill again.
bool Scheduler::ReadmitsFirst() const {
  return config_.role == Role::kDecode || (config_.role == Role::kFused && coordinator_.has_host_tier());
}

// Those that have output first, then the one that was retracted first.
Request* Scheduler::NextReadmission() const {
  if (!ReadmitsFirst()) {
    return nullptr;
  }
  Request* next = nullptr;
  for (Request* request : QueueOf(Phase::kRetracted)) {
    const auto place_of = [](const Request& r) { return std::pair(!r.has_output(), r.retraction_epoch); };
    if (!request->IsComplete() && (next == nullptr || place_of(*request) < place_of(*next))) {
      next = request;
    }
  }
  return next;
}

void Scheduler::PlanRemoteAdmissions(Round& round) {
  if (round.is_sealed()) {
    return;
  }
  AdmissionLine line;
  RequestQueue& waiting = QueueOf(Phase::kWaiting);
  for (auto next = waiting.begin(); next != waiting.end() && slots_.has_free_slot();) {
    Request& request = **next++;
    if (request.is_remote && AdmitRemote(round, request)) {
      line.NoteAdmitted();
    } else if (request.blocked && !line.PassBlocked(request)) {
      return;
    }
  }
}

// REQUIRES: a slot is free.
bool Scheduler::AdmitRemote(Round& round, Request& request) {
  std::optional<Holdings> holdings = AdmitFirst(round, request, /*is_local=*/false);
  if (!holdings) {
    return false;
  }
  GrantRemote(round, request, *holdings);
  SetState(request, GrantRemotePrefill(std::get<Waiting>(std::move(request.state)), std::move(*holdings)));
  return true;
}

void Scheduler::GrantRemote(Round& round, Request& request, const Holdings& holdings) const {
  RemotePrefill grant{.request_id = request.request_id,
                      .from_token = holdings.num_hit_tokens,
                      .first_slots = {},
                      .block_ids = {}};
  for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
    const CacheGroup& granted = coordinator_.group(group);
    const std::int64_t first_slot =
        granted.FirstLandingSlot(holdings.num_hit_tokens, request.num_prompt_tokens);
    const auto end_slot = static_cast<std::ptrdiff_t>(granted.geometry.BlocksFor(request.num_prompt_tokens));
    const std::span<const std::int32_t> ids = holdings.tables[static_cast<std::size_t>(group)].block_ids();
    grant.first_slots.push_back(static_cast<std::int32_t>(first_slot));
    grant.block_ids.emplace_back(ids.begin() + first_slot, ids.begin() + end_slot);
  }
  round.plan().remote_prefills.push_back(std::move(grant));
}

}  // namespace pdmesh
