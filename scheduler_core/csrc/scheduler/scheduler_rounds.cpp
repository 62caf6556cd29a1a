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
  Round round(coordinator_.num_groups(), config_.max_batch_size, config_.token_budget);
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
      PlanDecodes(round, config_.verify_width);
      PlanPrefills(round);
      break;
  }
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
    PublishPending(*request, *HoldingsOf(request->state));
    round.plan().handovers.push_back({.request_id = request->request_id, .token = request->tokens.back()});
    SetState(*request, StartHandover(std::get<PrefillDone>(std::move(request->state))));
  }
}

void Scheduler::PlanDecodes(Round& round, std::int32_t cost_tokens_per_row) {
  for (Request* request : QueueOf(Phase::kDecoding)) {
    if (round.num_free_rows() == 0 || round.num_budget_tokens() < cost_tokens_per_row) {
      return;
    }
    if (!request->CanDecode()) {
      continue;
    }
    if (auto* done = std::get_if<PrefillDone>(&request->state)) {
      request->state = StartDecoding(std::move(*done));  // the same line, so no queue changes
    }
    auto& decoding = std::get<Decoding>(request->state);
    PublishPending(*request, decoding.holdings);
    coordinator_.ConsumeReserve(decoding.holdings.tables, config_.verify_width);
    decoding.owes_result = true;
    round.AddDecodeRow(*request, cost_tokens_per_row);
  }
}

void Scheduler::PlanPrefills(Round& round) {
  if (PlanResidentChunks(round)) {
    PlanNewPrompts(round);
  }
}

// False when a prompt is left incomplete: nothing younger is prefilled before it.
bool Scheduler::PlanResidentChunks(Round& round) {
  RequestQueue& resident = QueueOf(Phase::kPrefilling);
  for (auto next = resident.begin(); next != resident.end();) {
    Request& request = **next++;
    if (request.OwesResult() || !round.has_room()) {
      return false;
    }
    PlanChunk(round, request);
    if (request.phase() == Phase::kPrefilling) {
      return false;
    }
  }
  return true;
}

void Scheduler::PlanNewPrompts(Round& round) {
  AdmissionLine line;
  RequestQueue& waiting = QueueOf(Phase::kWaiting);
  for (auto next = waiting.begin(); next != waiting.end();) {
    Request& request = **next++;
    const bool may_start =
        config_.role != Role::kPrefill || num_ready_ungranted_ < config_.max_ready_ungranted;
    if (!round.has_room() || !slots_.has_free_slot() || !may_start) {
      return;
    }
    if (AdmitPrompt(round, request) == AdmitOutcome::kAdmitted) {
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
  PlanRemoteAdmissions(round);
  if (is_turn_of_others && !round.has_work()) {
    last_round_was_local_prefill_ = PlanOneLocalPrefill(round);
  }
}

bool Scheduler::PlanOneLocalPrefill(Round& round) {
  const RequestQueue& resident = QueueOf(Phase::kPrefilling);
  if (!resident.empty()) {
    Request& oldest = **resident.begin();
    if (oldest.OwesResult()) {
      return false;
    }
    PlanChunk(round, oldest);
    return true;
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

void Scheduler::PlanRemoteAdmissions(Round& round) {
  AdmissionLine line;
  RequestQueue& waiting = QueueOf(Phase::kWaiting);
  for (auto next = waiting.begin(); next != waiting.end() && slots_.has_free_slot();) {
    Request& request = **next++;
    std::optional<Holdings> holdings;
    if (request.is_remote) {
      holdings = AdmitFirst(round, request, /*is_local=*/false);
    }
    if (holdings) {
      line.NoteAdmitted();
      GrantRemote(round, request, *holdings);
      SetState(request,
               GrantRemotePrefill(std::get<Waiting>(std::move(request.state)), std::move(*holdings)));
    } else if (request.blocked && !line.PassBlocked(request)) {
      return;
    }
  }
}

void Scheduler::GrantRemote(Round& round, Request& request, const Holdings& holdings) const {
  RemotePrefill grant{.request_id = request.request_id,
                      .from_token = holdings.num_hit_tokens,
                      .first_slots = {},
                      .block_ids = {}};
  for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
    const GroupGeometry& geometry = coordinator_.group(group).geometry;
    const std::int32_t first_slot = holdings.num_hit_tokens / geometry.block_granularity();
    const auto end_slot = static_cast<std::ptrdiff_t>(geometry.BlocksFor(request.num_prompt_tokens));
    const std::span<const std::int32_t> ids = holdings.tables[static_cast<std::size_t>(group)].block_ids();
    grant.first_slots.push_back(first_slot);
    grant.block_ids.emplace_back(ids.begin() + first_slot, ids.begin() + end_slot);
  }
  round.plan().remote_prefills.push_back(std::move(grant));
}

// The next chunk of an admitted prompt. REQUIRES: the round has room and no result is owed.
void Scheduler::PlanChunk(Round& round, Request& request) {
  auto& prefilling = std::get<Prefilling>(request.state);
  Holdings& holdings = prefilling.holdings;
  const std::int32_t begin = holdings.num_computed_tokens;
  const std::int32_t chunk = std::min(request.num_prompt_tokens - begin, round.num_budget_tokens());
  const RequestProgress progress = ProgressOf(request, holdings);
  const DenseGrowth growth{.extent_tokens = chunk, .reserve_tokens = 0};
  const auto admission = coordinator_.AdmitNext(holdings.tables, holdings.epoch, progress, growth);
  Ensure(admission.has_value(), "a resident chunk had to wait for memory that its admission reserved");
  holdings.num_published_grains = progress.end_grain;
  round.AddZeroBlocks(admission->fresh_ids);
  holdings.num_computed_tokens = begin + chunk;
  prefilling.owes_result = true;
  round.AddPrefillRow(request, begin, chunk);
  if (holdings.num_computed_tokens == request.num_prompt_tokens) {
    SetState(request, CompletePrompt(std::move(prefilling)));
  }
}

// The first chunk of a waiting prompt. REQUIRES: the round has room and a slot is free.
Scheduler::AdmitOutcome Scheduler::AdmitPrompt(Round& round, Request& request) {
  std::optional<Holdings> holdings = AdmitFirst(round, request, /*is_local=*/true);
  if (!holdings) {
    return AdmitOutcome::kBlocked;
  }
  const std::int32_t begin = holdings->num_hit_tokens;
  const std::int32_t chunk = holdings->num_computed_tokens - begin;
  SetState(request, StartPrefill(std::get<Waiting>(std::move(request.state)), std::move(*holdings)));
  round.AddPrefillRow(request, begin, chunk);
  if (begin + chunk == request.num_prompt_tokens) {
    SetState(request, CompletePrompt(std::get<Prefilling>(std::move(request.state))));
  }
  return AdmitOutcome::kAdmitted;
}

// Secures everything the request can ever need. A local prompt computes its first chunk in this round, a
// remote one is filled whole by the peer.
std::optional<Holdings> Scheduler::AdmitFirst(Round& round, Request& request, bool is_local) {
  if (IsStillBlocked(request)) {
    return std::nullopt;
  }
  const PrefixProbe probe = Probe(request);
  std::optional<Holdings> holdings = AdmitBehind(round, request, probe, is_local);
  if (!holdings && probe.hit_tokens > 0) {
    // Hits pin the parents they lie in, more of them than a compact table would take. A prompt near the bound
    // could wait for those for ever, in an idle pool too, so it is tried without its hits.
    holdings = AdmitBehind(round, request, coordinator_.ProbePrefix({}, 0), is_local);
  }
  if (holdings) {
    request.blocked.reset();
  } else {
    request.blocked = {
        .capacity_version = coordinator_.capacity_version(),
        .num_hit_grains = static_cast<std::int32_t>(probe.hit_tokens) / config_.prefix_granularity};
  }
  return holdings;
}

// Admits behind the hits of `probe` if it fits.
std::optional<Holdings> Scheduler::AdmitBehind(Round& round, const Request& request, const PrefixProbe& probe,
                                               bool is_local) {
  const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
  const std::int32_t left = request.num_prompt_tokens - hit_tokens;
  const std::int32_t computed_now = is_local ? std::min(left, round.num_budget_tokens()) : left;
  const std::int64_t needed = TokensBehind(request, hit_tokens);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  const auto admission = coordinator_.AdmitFirst(
      tables, probe, {.extent_tokens = computed_now, .reserve_tokens = needed - computed_now});
  if (!admission) {
    return std::nullopt;
  }
  round.AddZeroBlocks(admission->fresh_ids);
  round.plan().admissions.push_back({.request_id = request.request_id,
                                     .device_hit_tokens = hit_tokens,
                                     .host_hit_tokens = 0,
                                     .storage_hit_tokens = 0});
  return Holdings{.slot = slots_.Lease(),
                  .tables = std::move(tables),
                  .epoch = admission->epoch,
                  .uses = admission->uses,
                  .num_hit_tokens = hit_tokens,
                  .num_computed_tokens = hit_tokens + computed_now,
                  .num_published_grains = hit_tokens / config_.prefix_granularity};
}

// The last prompt token is never taken from the cache: computing it gives the first logits.
PrefixProbe Scheduler::Probe(Request& request) {
  const std::int32_t num_grains =
      config_.enable_prefix_cache ? (request.num_prompt_tokens - 1) / config_.prefix_granularity : 0;
  request.chain.ExtendTo(request.tokens, num_grains);
  return coordinator_.ProbePrefix(request.chain.digests(), num_grains);
}

bool Scheduler::IsStillBlocked(const Request& request) const {
  if (!request.blocked) {
    return false;
  }
  const std::int32_t next_grain = request.blocked->num_hit_grains;
  const bool can_grow = config_.enable_prefix_cache &&
                        next_grain < (request.num_prompt_tokens - 1) / config_.prefix_granularity;
  if (can_grow && coordinator_.HasGrain(request.chain.digests(), next_grain)) {
    return false;
  }
  // It has no more hits than when it failed, so what could not fit behind those fits behind none.
  return request.blocked->capacity_version == coordinator_.capacity_version() ||
         !coordinator_.CouldAdmit(
             {.extent_tokens = TokensBehind(request, std::int64_t{next_grain} * config_.prefix_granularity),
              .reserve_tokens = 0});
}

std::int64_t Scheduler::TokensBehind(const Request& request, std::int64_t hit_tokens) const {
  return capacity_model_.TokensToReserve(request.num_prompt_tokens, request.max_new_tokens) - hit_tokens;
}

void Scheduler::PublishPending(Request& request, Holdings& holdings) {
  const RequestProgress progress = ProgressOf(request, holdings);
  if (progress.first_grain < progress.end_grain) {
    coordinator_.Publish(holdings.tables, holdings.epoch, progress);
    holdings.num_published_grains = progress.end_grain;
  }
}

RequestProgress Scheduler::ProgressOf(Request& request, Holdings& holdings) const {
  const std::int32_t first_grain = holdings.num_published_grains;
  const std::int32_t end_grain =
      config_.enable_prefix_cache ? holdings.num_computed_tokens / config_.prefix_granularity : first_grain;
  request.chain.ExtendTo(request.tokens, end_grain);
  return {.digests = request.chain.digests(),
          .first_grain = first_grain,
          .end_grain = std::max(first_grain, end_grain),
          .keeps_duplicates = config_.role == Role::kPrefill,
          .uses = &holdings.uses};
}

}  // namespace pdmesh
