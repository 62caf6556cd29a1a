// A request that has no blocks: the transaction that secures its prompt, or the reason why it waits.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"

namespace pdmesh {

// The first chunk of a waiting prompt. REQUIRES: the round has room and a slot is free.
Scheduler::AdmitOutcome Scheduler::AdmitPrompt(Round& round, Request& request) {
  std::optional<Holdings> holdings = AdmitFirst(round, request, /*is_local=*/true);
  if (!holdings) {
    return request.blocked ? AdmitOutcome::kBlocked : AdmitOutcome::kNoRoom;
  }
  const std::int32_t begin = holdings->num_hit_tokens;
  const std::int32_t chunk = holdings->num_computed_tokens - begin;
  SetState(request, request.phase() == Phase::kRetracted ? StartPrefill(Retracted(), std::move(*holdings))
                                                         : StartPrefill(Waiting(), std::move(*holdings)));
  round.AddPrefillRow(request, begin, chunk, ReplayTokens(begin));
  NoteChunkPlanned(request);
  return AdmitOutcome::kAdmitted;
}

// Secures the prompt and the headroom behind it. A local prompt computes its first chunk in this round, a
// remote one is filled whole by the peer. If it does not fit the request is marked as blocked; if it does and
// only the budget of the round is too small it is not.
std::optional<Holdings> Scheduler::AdmitFirst(Round& round, Request& request, bool is_local) {
  if (IsStillBlocked(request, is_local, round.num_budget_tokens())) {
    NoteBlockedPrompt(round, request);
    return std::nullopt;
  }
  std::vector<PrefixProbe> probes = {Probe(request, is_local)};
  if (probes.front().hit_tokens > 0) {
    // Hits pin the parents they lie in, more of them than a compact table would take. A prompt near the bound
    // could wait for those for ever, in an idle pool too, so it is tried without its hits.
    probes.push_back(coordinator_.ProbePrefix({}, 0));
  }
  request.blocked.reset();
  if (!MayJoin(round, probes.front())) {
    return std::nullopt;
  }
  for (const PrefixProbe& probe : probes) {
    if (FirstChunkTokens(round, request, probe, is_local) == 0) {
      const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
      if (coordinator_.CanAdmit(probe, LeastDemands(request, hit_tokens, is_local))) {
        return std::nullopt;
      }
      continue;
    }
    FirstAdmission admission = AdmitBehind(round, request, probe, is_local);
    if (admission.holdings || admission.is_out_of_budget) {
      return std::move(admission.holdings);
    }
  }
  request.blocked = {.capacity_version = coordinator_.capacity_version(),
                     .publication_version = coordinator_.publication_version(),
                     .num_hit_grains = static_cast<std::int32_t>(probes.front().device_hit_tokens) /
                                       config_.prefix_granularity,
                     .num_budget_tokens = round.num_budget_tokens()};
  NoteBlockedPrompt(round, request);
  return std::nullopt;
}

// A read from storage may miss, and then all rows of the plan are given up. On the prefill role a transfer
// may read what earlier chunks computed, so there such a prompt does not run beside them.
bool Scheduler::MayJoin(const Round& round, const PrefixProbe& probe) const {
  return config_.role != Role::kPrefill || !round.has_later_chunk() || !coordinator_.ReadsStorage(probe);
}

// A retracted request gave way to others already: it waits and asks nobody to give way to it.
void Scheduler::NoteBlockedPrompt(Round& round, Request& request) const {
  const bool is_readmission = ReadmitsFirst() && request.phase() == Phase::kRetracted;
  if (request.num_retractions == 0 && !is_readmission) {
    round.NoteBlocked(request);
  }
}

// Completion tokens that the request's next admission secures: a step at least if the completion has an end.
std::int64_t Scheduler::HeadroomTokens(const Request& request) const {
  if (!request.max_new_tokens && config_.role != Role::kPrefill) {
    // One that gave way comes back where it gets further than it was: else its last chunk finds no room for
    // the step behind it, and it gives way again without end.
    return request.num_retractions > 0 ? capacity_model_.StepTokens(request.num_prompt_tokens) : 0;
  }
  return std::max(capacity_model_.HeadroomTokens(request.num_wanted_tokens(), request.num_retractions),
                  capacity_model_.StepTokens(request.num_prompt_tokens));
}

std::int32_t Scheduler::FirstChunkTokens(const Round& round, const Request& request, const PrefixProbe& probe,
                                         bool is_local) const {
  const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
  const auto promotion_tokens = static_cast<std::int32_t>(probe.closed_tokens);
  const std::int32_t num_budget_tokens = round.num_budget_tokens() - ReplayTokens(hit_tokens);
  return is_local ? ChunkTokens(request, hit_tokens, num_budget_tokens, promotion_tokens)
                  : request.num_prompt_tokens - hit_tokens;
}

// Admits behind the hits of `probe` if it fits, or behind as much of them as the host can take.
Scheduler::FirstAdmission Scheduler::AdmitBehind(Round& round, Request& request, PrefixProbe probe,
                                                 bool is_local) {
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  std::int32_t end = 0;
  bool is_out_of_budget = false;
  const auto demands_for = [&](const PrefixProbe& tried) -> std::optional<std::vector<GroupDemand>> {
    const auto begin = static_cast<std::int32_t>(tried.hit_tokens);
    const std::int32_t chunk = FirstChunkTokens(round, request, tried, is_local);
    end = begin + chunk;
    is_out_of_budget = chunk == 0;
    if (is_out_of_budget) {
      return std::nullopt;
    }
    return capacity_model_.FirstDemands(
        SpanOf(request, begin, end, is_local, is_local ? ReplayTokens(begin) : 0));
  };
  auto admission = coordinator_.AdmitFirst(tables, probe, demands_for);
  if (!admission) {
    return {.holdings = {}, .is_out_of_budget = is_out_of_budget};
  }
  NoteRestored(request, probe);
  const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
  const auto device_hit_tokens = static_cast<std::int32_t>(probe.device_hit_tokens);
  const auto storage_hit_tokens = static_cast<std::int32_t>(probe.storage_hit_tokens);
  round.AddZeroBlocks(admission->fresh_ids);
  round.plan().admissions.push_back({.request_id = request.request_id,
                                     .device_hit_tokens = device_hit_tokens,
                                     .host_hit_tokens = hit_tokens - device_hit_tokens - storage_hit_tokens,
                                     .storage_hit_tokens = storage_hit_tokens});
  Holdings holdings{.slot = slots_.Lease(),
                    .reserve = std::move(admission->reserve),
                    .tables = std::move(tables),
                    .epoch = admission->epoch,
                    .uses = admission->uses,
                    .num_hit_tokens = hit_tokens,
                    .num_computed_tokens = hit_tokens,
                    .num_published_grains = hit_tokens / config_.prefix_granularity,
                    .is_secured = config_.role == Role::kPrefill ||
                                  (request.max_new_tokens.has_value() &&
                                   HeadroomTokens(request) >= request.num_wanted_tokens())};
  if (is_local && probe.closed_tokens > probe.hit_tokens) {
    holdings.promotion_tokens = static_cast<std::int32_t>(probe.closed_tokens);
  }
  NoteComputed(request, holdings, end, is_local);
  return {.holdings = std::move(holdings)};
}

// The last prompt token is never taken from the cache: computing it gives the first logits. Without a prefix
// cache only what the request itself left on its retraction is looked for.
std::int32_t Scheduler::NumGrainsToMatch(const Request& request) const {
  const bool has_snapshot = coordinator_.has_host_tier() && request.num_retractions > 0;
  return config_.enable_prefix_cache || has_snapshot
             ? (request.num_prompt_tokens - 1) / config_.prefix_granularity
             : 0;
}

PrefixProbe Scheduler::Probe(Request& request, bool is_local) {
  const std::int32_t num_grains = NumGrainsToMatch(request);
  request.chain.ExtendTo(request.tokens, num_grains);
  return coordinator_.ProbePrefix(request.chain.digests(), num_grains,
                                  is_local ? ProbeScope::kAllGroups : ProbeScope::kHistoryGroups);
}

bool Scheduler::IsStillBlocked(const Request& request, bool is_local, std::int32_t num_budget_tokens) const {
  if (!request.blocked) {
    return false;
  }
  // Behind an undeclared completion's prompt room is needed once a chunk reaches its end; a shorter one may
  // fit.
  if (!request.max_new_tokens && num_budget_tokens < request.blocked->num_budget_tokens) {
    return false;
  }
  // Behind a hit on the host the device's own blocks are claimed that its hit does not reach, so what it asks
  // for is known only when it is looked up.
  if (coordinator_.has_host_tier() &&
      (request.blocked->publication_version != coordinator_.publication_version() ||
       request.blocked->capacity_version != coordinator_.capacity_version())) {
    return false;
  }
  const std::int32_t next_grain = request.blocked->num_hit_grains;
  const bool can_grow = next_grain < NumGrainsToMatch(request) &&
                        request.blocked->publication_version != coordinator_.publication_version();
  if (can_grow && coordinator_.HasClosedGrain(request.chain.digests(), next_grain)) {
    return false;
  }
  if (request.blocked->capacity_version == coordinator_.capacity_version()) {
    return true;
  }
  // It has no more hits than when it failed, so what could not fit behind those fits behind none.
  const std::int32_t hit_tokens = next_grain * config_.prefix_granularity;
  return !coordinator_.CouldAdmit(LeastDemands(request, hit_tokens, is_local));
}

// The least that a prompt asks for behind `hit_tokens`, however much of it the first chunk computes.
std::vector<GroupDemand> Scheduler::LeastDemands(const Request& request, std::int32_t hit_tokens,
                                                 bool is_local) const {
  const std::int32_t end = is_local ? hit_tokens : request.num_prompt_tokens;
  return capacity_model_.FirstDemands(SpanOf(request, hit_tokens, end, is_local));
}

}  // namespace pdmesh
