// One request: what its next row takes, and the transaction that gives it the blocks.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {

// Results of earlier plans are out no deeper than plans may overlap, and no row of it is in this one.
bool Scheduler::CanTakeRow(const Request& request) const {
  return request.num_results_out() <= config_.overlap_depth && request.last_plan != num_plans_;
}

// What the request's next decode row feeds, 0 if it gets none in this round.
std::int32_t Scheduler::DecodeWidth(const Request& request) const {
  return CanTakeRow(request) ? std::clamp(request.num_open_tokens(), 0, config_.verify_width) : 0;
}

// What the next decode row needs beyond what is covered. It may begin as late as the results that are out can
// move it, so it is covered up to where it ends then.
std::int64_t Scheduler::DecodeGrowthTokens(const Request& request) const {
  const std::int64_t end =
      std::int64_t{request.num_tokens()} - 1 + request.results_out().max_tokens() + DecodeWidth(request);
  return std::max<std::int64_t>(0, end - HoldingsOf(request.state)->num_covered_tokens);
}

// Room in the full groups for what a step takes, or for what the runtime reserved. What a reservation would
// need beyond the longest request is left out, so that it can be had. Other groups were promised all they
// hold.
std::int64_t Scheduler::DecodeRoomTokens(const Request& request) const {
  const auto* decoding = std::get_if<Decoding>(&request.state);
  const std::int64_t most =
      capacity_model_.max_covered_tokens() - HoldingsOf(request.state)->num_covered_tokens;
  const std::int64_t num_reserved = decoding == nullptr ? 0 : decoding->reserve_tokens;
  return std::max(DecodeGrowthTokens(request), std::min(num_reserved, most));
}

// False, with nothing changed, while a full group needs a block that cannot be had.
// REQUIRES: DecodeWidth(request) > 0 and room in the round.
bool Scheduler::PlanDecodeRow(Round& round, Request& request) {
  const std::int32_t num_input_tokens = DecodeWidth(request);
  const std::int64_t growth_tokens = DecodeGrowthTokens(request);
  Holdings& secured = *HoldingsOf(request.state);
  if (!coordinator_.Secure(secured.tables, secured.num_computed_tokens, DecodeRoomTokens(request),
                           round.plan().zero_blocks)) {
    round.NoteBlocked(request);
    return false;
  }
  const bool is_first = request.phase() != Phase::kDecoding;  // the same line, so no queue changes
  if (auto* done = std::get_if<PrefillDone>(&request.state)) {
    request.state = StartDecoding(std::move(*done));
  } else if (auto* awaiting = std::get_if<AwaitingResult>(&request.state)) {
    request.state = StartDecoding(std::move(*awaiting));
  }
  auto& decoding = std::get<Decoding>(request.state);
  decoding.reserve_tokens = 0;
  Holdings& holdings = decoding.holdings;
  PublishPending(request, holdings, is_first ? PrefillStoreScope() : DecodeStoreScope());
  coordinator_.Step(holdings.tables, holdings.num_computed_tokens, growth_tokens, round.plan().zero_blocks);
  holdings.num_covered_tokens += growth_tokens;
  if (is_first && coordinator_.has_open_group()) {
    holdings.reserve.LowerTo(capacity_model_.held_while_decoding());  // there will be no more chunks
  }
  round.AddDecodeRow(request, num_input_tokens, DecodeCostTokens());
  decoding.results_out.Add(num_input_tokens);
  request.last_plan = num_plans_;
  return true;
}

// New tokens of the next chunk, 0 if the round has too little budget left for one.
std::int32_t Scheduler::ChunkTokens(const Request& request, std::int32_t begin,
                                    std::int32_t num_budget_tokens, std::int32_t promotion_tokens) const {
  return pdmesh::ChunkTokens(chunk_rules_,
                             {.begin_tokens = begin,
                              .num_left_tokens = request.num_prompt_tokens - begin,
                              .promotion_tokens = promotion_tokens},
                             num_budget_tokens);
}

std::int32_t Scheduler::ReplayTokens(std::int32_t hit_tokens) const {
  return pdmesh::ReplayTokens(chunk_rules_, hit_tokens);
}

PromptSpan Scheduler::SpanOf(const Request& request, std::int32_t begin, std::int32_t end, bool is_local,
                             std::int32_t replay_tokens) const {
  const std::int64_t num_step_end_tokens =
      request.num_prompt_tokens + capacity_model_.StepTokens(request.num_prompt_tokens);
  const std::int64_t num_limit_tokens =
      config_.role == Role::kPrefill ? num_step_end_tokens
                                     : std::max<std::int64_t>(num_step_end_tokens, request.limit_tokens);
  return {.begin_tokens = begin,
          .end_tokens = end,
          .num_prompt_tokens = request.num_prompt_tokens,
          .num_headroom_tokens = HeadroomTokens(request),
          .num_limit_tokens = num_limit_tokens,
          .is_local = is_local,
          .replay_tokens = replay_tokens};
}

// The prompt is computed up to `end`, or will be when it has landed. A chunk leaves a snapshot on the last
// grain boundary it reached; a peer sends the final state alone.
void Scheduler::NoteComputed(const Request& request, Holdings& holdings, std::int32_t end,
                             bool is_local) const {
  const std::int32_t boundary = end / config_.prefix_granularity * config_.prefix_granularity;
  const std::int32_t last_boundary =
      request.num_prompt_tokens / config_.prefix_granularity * config_.prefix_granularity;
  const bool has_snapshot = is_local ? boundary > holdings.num_computed_tokens : boundary == end;
  holdings.checkpoint_tokens = has_snapshot ? boundary : 0;
  holdings.boundary_tokens = boundary;
  holdings.boundary_kind = boundary == last_boundary ? BoundaryKind::kEndpoint : BoundaryKind::kChunk;
  if (is_local && end == holdings.promotion_tokens) {
    holdings.boundary_kind = BoundaryKind::kPromoted;
  }
  if (end >= holdings.promotion_tokens) {
    holdings.promotion_tokens = 0;
  }
  holdings.num_computed_tokens = end;
  holdings.num_covered_tokens = end;
}

// The next chunk of an admitted prompt. False if it gets none in this round.
// REQUIRES: the round has room and the request can take a row.
bool Scheduler::PlanChunk(Round& round, Request& request) {
  auto& prefilling = std::get<Prefilling>(request.state);
  Holdings& holdings = prefilling.holdings;
  const std::int32_t begin = holdings.num_computed_tokens;
  const std::int32_t chunk =
      ChunkTokens(request, begin, round.num_budget_tokens(), holdings.promotion_tokens);
  if (chunk == 0) {
    return false;
  }
  const RequestProgress progress =
      ProgressOf(request, holdings, PrefillStoreScope(), config_.enable_prefix_cache);
  const auto admission = coordinator_.AdmitNext(
      holdings.tables, holdings.epoch, progress, begin,
      capacity_model_.NextExtents(SpanOf(request, begin, begin + chunk, /*is_local=*/true)));
  if (!admission) {  // the last chunk wants more than the prompt, or a transfer holds what would expire
    round.NoteBlocked(request);
    return false;
  }
  holdings.num_published_grains = progress.end_grain;
  DescribePublished(request);
  round.AddZeroBlocks(admission->fresh_ids);
  NoteComputed(request, holdings, begin + chunk, /*is_local=*/true);
  round.AddPrefillRow(request, begin, chunk);
  round.NoteLaterChunk();
  NoteChunkPlanned(request);
  return true;
}

// The chunk whose row was added last: its result brings the first token if it completes the prompt.
void Scheduler::NoteChunkPlanned(Request& request) {
  auto& prefilling = std::get<Prefilling>(request.state);
  const bool is_last = prefilling.holdings.num_computed_tokens == request.num_prompt_tokens;
  prefilling.results_out.Add(is_last ? 1 : 0);
  request.last_plan = num_plans_;
  if (is_last) {
    SetState(request, CompletePrompt(std::move(prefilling)));
  }
}

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
  return config_.role != Role::kPrefill || !round.has_later_chunk() || !probe.reads_storage();
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
    return 0;
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

void Scheduler::PublishPending(Request& request, Holdings& holdings, StoreScope scope) {
  Publish(request, holdings, ProgressOf(request, holdings, scope, config_.enable_prefix_cache));
}

void Scheduler::Publish(Request& request, Holdings& holdings, const RequestProgress& progress) {
  if (progress.first_grain < progress.end_grain) {
    coordinator_.Publish(holdings.tables, holdings.epoch, progress);
    holdings.num_published_grains = progress.end_grain;
    DescribePublished(request);
  }
}

// An admission published what the host had; what storage reads is published when it is there.
void Scheduler::NoteRestored(Request& request, const PrefixProbe& probe) {
  DescribePublished(request);
  if (prefix_events_ && probe.storage_hit_tokens > 0) {
    const std::span<const Digest> digests =
        probe.digests.first(static_cast<std::size_t>(probe.hit_tokens / config_.prefix_granularity));
    planned_readings_.push_back(
        {.tokens = {request.tokens.begin(), request.tokens.begin() + probe.hit_tokens},
         .digests = {digests.begin(), digests.end()}});
  }
}

void Scheduler::DescribePublished(Request& request) {
  if (prefix_events_) {
    prefix_events_->Describe(request.tokens, request.event_hashes);
  }
}

// Publishes what a retracted request would want to find again: full grains, and the newest state that one of
// its chunks left, whatever boundary that was. The host copies it ahead of what the plan does with the
// blocks.
void Scheduler::PublishSnapshot(Request& request, Holdings& holdings) {
  if (request.phase() == Phase::kPrefilling) {
    holdings.boundary_kind = std::max(holdings.boundary_kind, BoundaryKind::kEndpoint);
  }
  const bool is_kept = config_.enable_prefix_cache || coordinator_.has_host_tier();
  Publish(request, holdings, ProgressOf(request, holdings, StoreScope::kNothing, is_kept));
  QueueSnapshot(request, holdings, StoreGuard::kAhead);
}

void Scheduler::QueueSnapshot(const Request& request, const Holdings& holdings, StoreGuard guard) {
  coordinator_.QueueSnapshot(request.chain.digests(), holdings.num_published_grains, guard);
}

StoreScope Scheduler::PrefillStoreScope() const {
  return config_.role == Role::kDecode ? StoreScope::kNothing : StoreScope::kEverything;
}

StoreScope Scheduler::DecodeStoreScope() const {
  return config_.role == Role::kDecode ? StoreScope::kNothing : StoreScope::kWindows;
}

RequestProgress Scheduler::ProgressOf(Request& request, Holdings& holdings, StoreScope scope,
                                      bool publishes) const {
  const std::int32_t first_grain = holdings.num_published_grains;
  const std::int32_t end_grain =
      publishes ? holdings.num_computed_tokens / config_.prefix_granularity : first_grain;
  request.chain.ExtendTo(request.tokens, end_grain);
  return {.digests = request.chain.digests(),
          .first_grain = first_grain,
          .end_grain = std::max(first_grain, end_grain),
          .kind = end_grain * config_.prefix_granularity == holdings.boundary_tokens ? holdings.boundary_kind
                                                                                     : BoundaryKind::kChunk,
          .state_checkpoint_tokens = holdings.checkpoint_tokens,
          .keeps_duplicates = config_.role == Role::kPrefill,
          .uses = &holdings.uses,
          .store_scope = scope};
}

}  // namespace pdmesh
