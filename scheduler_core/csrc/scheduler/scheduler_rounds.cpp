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

// Decodes first, so that a long prompt cannot starve them. What a chunk needs to get anywhere is left to it;
// what it does not use goes to further decodes.
void Scheduler::PlanFused(Round& round) {
  const std::int32_t num_spared_tokens = SparedTokens();
  PlanDecodes(round, config_.verify_width, num_spared_tokens);
  PlanPrefills(round);
  if (num_spared_tokens > 0) {
    PlanDecodes(round, config_.verify_width, 0);
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
  const RequestQueue& waiting = QueueOf(Phase::kWaiting);
  return slots_.has_free_slot() &&
         std::any_of(waiting.begin(), waiting.end(),
                     [this](const Request* request) { return !IsStillBlocked(*request, /*is_local=*/true); });
}

void Scheduler::PlanDecodes(Round& round, std::int32_t cost_tokens_per_row, std::int32_t num_spared_tokens) {
  for (Request* request : QueueOf(Phase::kDecoding)) {
    if (round.num_free_rows() == 0 || round.num_budget_tokens() - num_spared_tokens < cost_tokens_per_row) {
      return;
    }
    if (const std::int32_t num_input_tokens = DecodeWidth(*request); num_input_tokens > 0) {
      PlanDecodeRow(round, *request, num_input_tokens, cost_tokens_per_row);
    }
  }
}

// Results of earlier plans are out no deeper than plans may overlap, and no row of it is in this one.
bool Scheduler::CanTakeRow(const Request& request) const {
  return request.num_results_out() <= config_.overlap_depth && request.last_plan != num_plans_;
}

// What the request's next decode row feeds, 0 if it gets none in this round.
std::int32_t Scheduler::DecodeWidth(const Request& request) const {
  return CanTakeRow(request) ? std::clamp(request.num_open_tokens(), 0, config_.verify_width) : 0;
}

// False, with nothing changed, while a full group needs a block that cannot be had. The row may begin as late
// as the results that are out can move it, so it is covered up to where it ends then.
bool Scheduler::PlanDecodeRow(Round& round, Request& request, std::int32_t num_input_tokens,
                              std::int32_t cost_tokens) {
  const std::int64_t end =
      std::int64_t{request.num_tokens()} - 1 + request.results_out().max_tokens() + num_input_tokens;
  const std::int64_t covered_tokens = std::max(end, HoldingsOf(request.state)->num_covered_tokens);
  const std::int64_t growth_tokens = covered_tokens - HoldingsOf(request.state)->num_covered_tokens;
  if (!SecureStep(round, request, growth_tokens)) {
    return false;
  }
  const bool is_first = request.phase() != Phase::kDecoding;  // the same line, so no queue changes
  if (auto* done = std::get_if<PrefillDone>(&request.state)) {
    request.state = StartDecoding(std::move(*done));
  } else if (auto* awaiting = std::get_if<AwaitingResult>(&request.state)) {
    request.state = StartDecoding(std::move(*awaiting));
  }
  auto& decoding = std::get<Decoding>(request.state);
  Holdings& holdings = decoding.holdings;
  PublishPending(request, holdings);
  coordinator_.Step(holdings.tables, holdings.num_computed_tokens, growth_tokens, round.plan().zero_blocks);
  holdings.num_covered_tokens = covered_tokens;
  if (is_first && coordinator_.has_open_group()) {
    holdings.reserve.LowerTo(capacity_model_.held_while_decoding());  // there will be no more chunks
  }
  round.AddDecodeRow(request, num_input_tokens, cost_tokens);
  decoding.results_out.Add(num_input_tokens);
  request.last_plan = num_plans_;
  return true;
}

// Room in the full groups for what a step takes, or for what the runtime reserved. What a reservation would
// need beyond the longest request is left out, so that it can be had. Other groups were promised all they
// hold.
bool Scheduler::SecureStep(Round& round, Request& request, std::int64_t growth_tokens) {
  auto* decoding = std::get_if<Decoding>(&request.state);
  Holdings& holdings = *HoldingsOf(request.state);
  std::int64_t num_tokens = growth_tokens;
  if (decoding != nullptr && decoding->reserve_tokens > 0) {
    const std::int64_t most = capacity_model_.max_covered_tokens() - holdings.num_covered_tokens;
    num_tokens = std::max(growth_tokens, std::min<std::int64_t>(decoding->reserve_tokens, most));
  }
  if (!coordinator_.Secure(holdings.tables, num_tokens, round.plan().zero_blocks)) {
    return false;
  }
  if (decoding != nullptr) {
    decoding->reserve_tokens = 0;
  }
  return true;
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
    if (!CanTakeRow(request) || !round.has_room()) {
      return false;
    }
    if (!PlanChunk(round, request) || request.phase() == Phase::kPrefilling) {
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
  PlanDecodes(round, 0, 0);
  PlanRemoteAdmissions(round);
  if (is_turn_of_others && !round.has_work()) {
    last_round_was_local_prefill_ = PlanOneLocalPrefill(round);
  }
}

bool Scheduler::PlanOneLocalPrefill(Round& round) {
  const RequestQueue& resident = QueueOf(Phase::kPrefilling);
  if (!resident.empty()) {
    Request& oldest = **resident.begin();
    if (!CanTakeRow(oldest)) {
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
  const std::int64_t num_needed_tokens =
      capacity_model_.TokensToReserve(request.num_prompt_tokens, request.max_new_tokens);
  const std::int64_t num_limit_tokens = config_.role == Role::kPrefill
                                            ? num_needed_tokens
                                            : std::max<std::int64_t>(num_needed_tokens, request.limit_tokens);
  return {.begin_tokens = begin,
          .end_tokens = end,
          .num_prompt_tokens = request.num_prompt_tokens,
          .num_needed_tokens = num_needed_tokens,
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
  const RequestProgress progress = ProgressOf(request, holdings);
  const auto admission = coordinator_.AdmitNext(
      holdings.tables, holdings.epoch, progress, begin,
      capacity_model_.NextExtents(SpanOf(request, begin, begin + chunk, /*is_local=*/true)));
  Ensure(admission.has_value(), "a resident chunk had to wait for memory that its admission reserved");
  holdings.num_published_grains = progress.end_grain;
  DescribePublished(request);
  round.AddZeroBlocks(admission->fresh_ids);
  NoteComputed(request, holdings, begin + chunk, /*is_local=*/true);
  round.AddPrefillRow(request, begin, chunk);
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
  SetState(request, StartPrefill(std::get<Waiting>(std::move(request.state)), std::move(*holdings)));
  round.AddPrefillRow(request, begin, chunk, ReplayTokens(begin));
  NoteChunkPlanned(request);
  return AdmitOutcome::kAdmitted;
}

// Secures everything the request can ever need. A local prompt computes its first chunk in this round, a
// remote one is filled whole by the peer. If it does not fit the request is marked as blocked; if only the
// budget of the round is too small it is not.
std::optional<Holdings> Scheduler::AdmitFirst(Round& round, Request& request, bool is_local) {
  if (IsStillBlocked(request, is_local)) {
    return std::nullopt;
  }
  const PrefixProbe probe = Probe(request, is_local);
  if (FirstChunkTokens(round, request, probe, is_local) == 0) {
    request.blocked.reset();
    return std::nullopt;
  }
  std::optional<Holdings> holdings = AdmitBehind(round, request, probe, is_local);
  if (!holdings && probe.hit_tokens > 0) {
    // Hits pin the parents they lie in, more of them than a compact table would take. A prompt near the bound
    // could wait for those for ever, in an idle pool too, so it is tried without its hits.
    const PrefixProbe none = coordinator_.ProbePrefix({}, 0);
    if (FirstChunkTokens(round, request, none, is_local) > 0) {
      holdings = AdmitBehind(round, request, none, is_local);
    }
  }
  if (holdings) {
    request.blocked.reset();
  } else {
    request.blocked = {
        .capacity_version = coordinator_.capacity_version(),
        .publication_version = coordinator_.publication_version(),
        .num_hit_grains = static_cast<std::int32_t>(probe.hit_tokens) / config_.prefix_granularity};
  }
  return holdings;
}

std::int32_t Scheduler::FirstChunkTokens(const Round& round, const Request& request, const PrefixProbe& probe,
                                         bool is_local) const {
  const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
  const auto promotion_tokens = static_cast<std::int32_t>(probe.closed_tokens);
  const std::int32_t num_budget_tokens = round.num_budget_tokens() - ReplayTokens(hit_tokens);
  return is_local ? ChunkTokens(request, hit_tokens, num_budget_tokens, promotion_tokens)
                  : request.num_prompt_tokens - hit_tokens;
}

// Admits behind the hits of `probe` if it fits.
std::optional<Holdings> Scheduler::AdmitBehind(Round& round, const Request& request, const PrefixProbe& probe,
                                               bool is_local) {
  const auto hit_tokens = static_cast<std::int32_t>(probe.hit_tokens);
  const std::int32_t end = hit_tokens + FirstChunkTokens(round, request, probe, is_local);
  std::vector<BlockTable> tables = coordinator_.MakeTables();
  const PromptSpan span = SpanOf(request, hit_tokens, end, is_local, is_local ? ReplayTokens(hit_tokens) : 0);
  auto admission = coordinator_.AdmitFirst(tables, probe, capacity_model_.FirstDemands(span));
  if (!admission) {
    return std::nullopt;
  }
  round.AddZeroBlocks(admission->fresh_ids);
  round.plan().admissions.push_back({.request_id = request.request_id,
                                     .device_hit_tokens = hit_tokens,
                                     .host_hit_tokens = 0,
                                     .storage_hit_tokens = 0});
  Holdings holdings{.slot = slots_.Lease(),
                    .reserve = std::move(admission->reserve),
                    .tables = std::move(tables),
                    .epoch = admission->epoch,
                    .uses = admission->uses,
                    .num_hit_tokens = hit_tokens,
                    .num_computed_tokens = hit_tokens,
                    .num_published_grains = hit_tokens / config_.prefix_granularity};
  if (is_local && probe.closed_tokens > probe.hit_tokens) {
    holdings.promotion_tokens = static_cast<std::int32_t>(probe.closed_tokens);
  }
  NoteComputed(request, holdings, end, is_local);
  return holdings;
}

// The last prompt token is never taken from the cache: computing it gives the first logits.
PrefixProbe Scheduler::Probe(Request& request, bool is_local) {
  const std::int32_t num_grains =
      config_.enable_prefix_cache ? (request.num_prompt_tokens - 1) / config_.prefix_granularity : 0;
  request.chain.ExtendTo(request.tokens, num_grains);
  return coordinator_.ProbePrefix(request.chain.digests(), num_grains,
                                  is_local ? ProbeScope::kAllGroups : ProbeScope::kHistoryGroups);
}

bool Scheduler::IsStillBlocked(const Request& request, bool is_local) const {
  if (!request.blocked) {
    return false;
  }
  const std::int32_t next_grain = request.blocked->num_hit_grains;
  const bool can_grow = config_.enable_prefix_cache &&
                        next_grain < (request.num_prompt_tokens - 1) / config_.prefix_granularity &&
                        request.blocked->publication_version != coordinator_.publication_version();
  if (can_grow && coordinator_.HasClosedGrain(request.chain.digests(), next_grain)) {
    return false;
  }
  if (request.blocked->capacity_version == coordinator_.capacity_version()) {
    return true;
  }
  // It has no more hits than when it failed, so what could not fit behind those fits behind none.
  const std::int32_t hit_tokens = next_grain * config_.prefix_granularity;
  return !coordinator_.CouldAdmit(
      capacity_model_.FirstDemands(SpanOf(request, hit_tokens, request.num_prompt_tokens, is_local)));
}

void Scheduler::PublishPending(Request& request, Holdings& holdings) {
  const RequestProgress progress = ProgressOf(request, holdings);
  if (progress.first_grain < progress.end_grain) {
    coordinator_.Publish(holdings.tables, holdings.epoch, progress);
    holdings.num_published_grains = progress.end_grain;
    DescribePublished(request);
  }
}

void Scheduler::DescribePublished(Request& request) {
  if (prefix_events_) {
    prefix_events_->Describe(request.tokens, request.event_hashes);
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
          .kind = end_grain * config_.prefix_granularity == holdings.boundary_tokens ? holdings.boundary_kind
                                                                                     : BoundaryKind::kChunk,
          .state_checkpoint_tokens = holdings.checkpoint_tokens,
          .keeps_duplicates = config_.role == Role::kPrefill,
          .uses = &holdings.uses};
}

}  // namespace pdmesh
