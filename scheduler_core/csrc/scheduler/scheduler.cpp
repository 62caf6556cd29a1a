#include "scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "support/errors.h"

namespace pdmesh {
namespace {

const SchedulerConfig& Validated(const SchedulerConfig& config) {
  config.Validate();
  return config;
}

// Rows of requests whose blocks are in transfer need no batch place, so a role that transfers has slots to
// spare.
std::int32_t NumSlots(const SchedulerConfig& config) {
  const std::int64_t num_slots = std::int64_t{config.max_batch_size} * (config.role == Role::kFused ? 1 : 2);
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(num_slots, std::numeric_limits<std::int32_t>::max()));
}

RowLayout LayoutOf(const SchedulerConfig& config) {
  RowLayout layout{.prefix_granularity = config.prefix_granularity, .state_granularity = {}};
  for (const CacheGroupConfig& group : config.cache_groups) {
    const bool is_state = group.family == Family::kState;
    layout.state_granularity.push_back(is_state ? group.block_granularity : 0);
    layout.has_state |= is_state;
  }
  return layout;
}

[[noreturn]] void RefuseRequest(const RequestSpec& spec, const std::string& why) {
  throw SubmitError("request \"" + spec.request_id + "\": " + why);
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(Validated(config)),
      capacity_model_(config_),
      row_layout_(LayoutOf(config_)),
      chunk_rules_{.prefix_granularity = config_.prefix_granularity,
                   .has_state = row_layout_.has_state,
                   .replay_window_tokens = config_.replay_window_tokens()},
      coordinator_(
          config_.prefix_granularity, config_.num_lcm_blocks, MakeSpecsFromConfig(config_),
          config_.eviction_policy,
          {.num_host_lcm_blocks = config_.num_host_lcm_blocks, .enable_storage = config_.enable_storage}),
      slots_(NumSlots(config_)) {
  if (config_.enable_prefix_events) {
    prefix_events_.emplace(coordinator_, config_.prefix_granularity);
  }
}

void Scheduler::CheckSpec(const RequestSpec& spec) const {
  if (spec.request_id.empty()) {
    RefuseRequest(spec, "request_id must not be empty");
  }
  if (requests_.contains(spec.request_id)) {
    RefuseRequest(spec, "request_id is already in use by a live request");
  }
  if (spec.tokens.empty()) {
    RefuseRequest(spec, "tokens must not be empty");
  }
  const auto negative =
      std::find_if(spec.tokens.begin(), spec.tokens.end(), [](std::int32_t id) { return id < 0; });
  if (negative != spec.tokens.end()) {
    RefuseRequest(spec, "tokens[" + std::to_string(negative - spec.tokens.begin()) +
                            "] must not be negative, got " + std::to_string(*negative));
  }
  if (spec.max_new_tokens && *spec.max_new_tokens < 0) {
    RefuseRequest(spec, "max_new_tokens must not be negative, got " + std::to_string(*spec.max_new_tokens));
  }
  const auto num_prompt_tokens = static_cast<std::int64_t>(spec.tokens.size());
  const std::int64_t needed_tokens = capacity_model_.TokensToCheck(num_prompt_tokens, spec.max_new_tokens);
  if (needed_tokens > max_request_tokens()) {
    RefuseRequest(spec, "prompt of " + std::to_string(num_prompt_tokens) + " tokens with max_new_tokens " +
                            (spec.max_new_tokens ? std::to_string(*spec.max_new_tokens) : "undeclared") +
                            " needs room for " + std::to_string(needed_tokens) + " tokens, the limit is " +
                            std::to_string(max_request_tokens()));
  }
}

void Scheduler::Submit(std::vector<RequestSpec> specs) {
  std::unordered_set<std::string> batch_ids;
  for (const RequestSpec& spec : specs) {
    CheckSpec(spec);
    if (!batch_ids.insert(spec.request_id).second) {
      RefuseRequest(spec, "request_id is given twice in one batch");
    }
  }
  for (RequestSpec& spec : specs) {
    const bool is_remote = config_.role == Role::kDecode && !spec.local_prefill;
    std::string request_id = spec.request_id;
    auto request = std::make_unique<Request>(std::move(spec), num_submitted_++, is_remote,
                                             config_.prefix_granularity, max_request_tokens());
    QueueOf(request->phase()).insert(request.get());
    requests_.emplace(std::move(request_id), std::move(request));
  }
}

void Scheduler::Advance(std::span<const AnyEventView> events) {
  const std::vector<JudgedChange> to_apply = JudgeEvents(events);
  for (const JudgedChange& change : to_apply) {
    if (const auto* judged = std::get_if<JudgedEvent>(&change)) {
      Apply(*judged->request, judged->event);
    } else if (const auto* given_up = std::get_if<GivenUp>(&change)) {
      GiveBlocksBack(*given_up->request);
    } else {
      ApplyTransferEvent(std::get<TransferEventView>(change));
    }
  }
  for (const JudgedChange& change : to_apply) {
    const auto* judged = std::get_if<JudgedEvent>(&change);
    Ensure(judged == nullptr || judged->request->phase() == judged->request->judged.phase,
           "events led to another state than was judged");
  }
}

// Plays the batch on views first, so that a bad event leaves even the events before it unapplied. Returns
// what changes something.
std::vector<Scheduler::JudgedChange> Scheduler::JudgeEvents(std::span<const AnyEventView> events) {
  ++num_event_batches_;
  std::vector<JudgedChange> to_apply;
  to_apply.reserve(events.size());
  for (const AnyEventView& event : events) {
    if (const auto* of_request = std::get_if<EventView>(&event)) {
      JudgeRequestEvent(*of_request, to_apply);
      continue;
    }
    const auto& of_transfer = std::get<TransferEventView>(event);
    if (const auto* load = std::get_if<const LoadDoneEvent*>(&of_transfer);
        load != nullptr && !(*load)->success) {
      JudgeFailedLoad(**load, to_apply);
    }
    to_apply.emplace_back(of_transfer);
  }
  return to_apply;
}

void Scheduler::JudgeRequestEvent(const EventView& event, std::vector<JudgedChange>& to_apply) {
  const auto found = requests_.find(RequestIdOf(event));
  if (found == requests_.end()) {
    return;
  }
  PhaseView& view = JudgedView(*found->second);
  const Judgement judgement = Judge(config_.role, view, event);
  view = judgement.next;
  if (judgement.verdict == Verdict::kApply) {
    to_apply.emplace_back(JudgedEvent{.request = found->second.get(), .event = event});
  }
}

// How the events of the batch so far would leave the request.
PhaseView& Scheduler::JudgedView(Request& request) {
  if (std::exchange(request.judged_batch, num_event_batches_) != num_event_batches_) {
    request.judged = request.view();
  }
  return request.judged;
}

void Scheduler::Apply(Request& request, const EventView& event) {
  if (const auto* result = std::get_if<const ResultEvent*>(&event)) {
    ApplyResult(request, **result);
  } else if (const auto* done = std::get_if<const DoneEvent*>(&event)) {
    request.tokens.push_back((*done)->token);
    SetState(request, LandRemotePrefill(std::get<RemotePrefilling>(std::move(request.state))));
  } else if (std::holds_alternative<const ReadyEvent*>(event)) {
    SetState(request, Waiting());
  } else if (std::holds_alternative<const GrantedEvent*>(event)) {
    num_ready_ungranted_ -= IsReadyUngranted(request) ? 1 : 0;
    request.is_granted = true;
  } else if (std::holds_alternative<const FinishEvent*>(event)) {
    Finish(request);
  } else if (const auto* reserve = std::get_if<const ReserveEvent*>(&event)) {
    std::get<Decoding>(request.state).reserve_tokens = (*reserve)->num_tokens;
  } else if (std::holds_alternative<const RetractEvent*>(event)) {
    GiveBlocksBack(request);
  } else if (std::holds_alternative<const HandedOverEvent*>(event) ||
             std::holds_alternative<const QuiescedEvent*>(event)) {
    SetState(request, Finished());
  } else {
    ApplyEarlyEnd(request);
  }
}

void Scheduler::ApplyResult(Request& request, const ResultEvent& result) {
  request.tokens.insert(request.tokens.end(), result.tokens.begin(), result.tokens.end());
  if (auto* prefilling = std::get_if<Prefilling>(&request.state)) {
    prefilling->results_out.Land();
  } else if (auto* decoding = std::get_if<Decoding>(&request.state)) {
    decoding->results_out.Land();
    decoding->holdings.num_computed_tokens = request.num_tokens() - 1;
  } else if (auto& awaiting = std::get<AwaitingResult>(request.state); result.tokens.empty()) {
    awaiting.results_out.Land();  // of a chunk before the last
  } else {
    SetState(request, LandFirstToken(std::move(awaiting)));
  }
}

void Scheduler::ApplyEarlyEnd(Request& request) {
  if (auto* remote = std::get_if<RemotePrefilling>(&request.state)) {
    std::vector<std::int32_t> num_hit_slots;
    for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
      num_hit_slots.push_back(
          static_cast<std::int32_t>(coordinator_.group(group).NumHitSlots(remote->holdings.num_hit_tokens)));
    }
    SetState(request, Quarantine(std::move(*remote), num_hit_slots));
  } else if (Holdings* holdings = HoldingsOf(request.state);
             holdings != nullptr && config_.role == Role::kPrefill) {
    SetState(request, HoldForTransfer(std::move(*holdings)));
  } else {
    SetState(request, Finished());
  }
}

void Scheduler::Finish(Request& request) {
  if (Holdings* holdings = HoldingsOf(request.state)) {
    PublishPending(request, *holdings, StoreScope::kNothing);
    if (config_.role != Role::kDecode) {  // that role copies what a retraction would lose, nothing else
      QueueSnapshot(request, *holdings, StoreGuard::kPinned);
    }
  }
  SetState(request, Finished());
}

bool Scheduler::CanClear() const {
  return requests_.size() == QueueOf(Phase::kFinished).size() && coordinator_.CanClear();
}

bool Scheduler::ClearDeviceCache() {
  if (!CanClear()) {
    return false;
  }
  coordinator_.Clear();
  if (prefix_events_) {
    prefix_events_->OnCleared();
  }
  if (prefix_keys_) {
    prefix_keys_->OnCleared();
  }
  return true;
}

bool Scheduler::ClearCache() {
  if (!ClearDeviceCache()) {
    return false;
  }
  coordinator_.ClearHost();
  return true;
}

void Scheduler::TrackPrefixEvents(bool with_extra_keys) {
  if (num_submitted_ > 0) {
    throw ContractError("prefixes cannot be announced from the middle: a request was submitted before");
  }
  announces_extra_keys_ = with_extra_keys;
  if (!prefix_events_) {
    prefix_events_.emplace(coordinator_, config_.prefix_granularity);
  }
}

std::vector<PrefixEvent> Scheduler::DrainPrefixEvents() {
  return prefix_events_ ? prefix_events_->Drain() : std::vector<PrefixEvent>();
}

void Scheduler::TrackPrefixKeys() {
  if (prefix_keys_) {
    return;
  }
  if (num_submitted_ > 0) {
    throw ContractError("prefix keys cannot be tracked from the middle: a request was submitted before");
  }
  prefix_keys_.emplace(coordinator_, config_.prefix_granularity);
}

PrefixKeyChanges Scheduler::DrainPrefixKeys() {
  return prefix_keys_ ? prefix_keys_->Drain() : PrefixKeyChanges();
}

void Scheduler::SetState(Request& request, RequestState state) {
  CountState(request, -1);
  QueueOf(request.phase()).erase(&request);
  CountQuarantined(request.state, -1);
  ReleaseBlocks(request.state);  // a transition that keeps them has moved them out
  request.state = std::move(state);
  CountQuarantined(request.state, 1);
  QueueOf(request.phase()).insert(&request);
  CountState(request, 1);
}

void Scheduler::CountState(const Request& request, std::int32_t change) {
  const Holdings* holdings = HoldingsOf(request.state);
  num_ready_ungranted_ += IsReadyUngranted(request) ? change : 0;
  num_unsecured_ += holdings != nullptr && !holdings->is_secured ? change : 0;
}

void Scheduler::CountQuarantined(const RequestState& state, std::int32_t change) {
  const auto* quarantined = std::get_if<Quarantined>(&state);
  if (quarantined == nullptr) {
    return;
  }
  for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
    for (const std::int32_t block_id : quarantined->tables[static_cast<std::size_t>(group)].block_ids()) {
      if (block_id != kNullBlockId) {
        const std::int32_t lcm_block = coordinator_.pool().PlaceOf(group, block_id).lcm_block;
        if ((num_quarantined_children_[lcm_block] += change) == 0) {
          num_quarantined_children_.erase(lcm_block);
        }
      }
    }
  }
}

// Requests that can decode stand in one line whether they have decoded before or not. On the prefill role it
// is the line of those to hand over. A retracted request that is not readmitted first stands among those that
// wait, in the place of its submission.
Scheduler::RequestQueue& Scheduler::QueueOf(Phase phase) {
  if (phase == Phase::kRetracted && !ReadmitsFirst()) {
    return queues_[static_cast<std::size_t>(Phase::kWaiting)];
  }
  const bool decodes =
      phase == Phase::kPrefillDone || (phase == Phase::kAwaitingResult && config_.role != Role::kPrefill);
  return queues_[static_cast<std::size_t>(decodes ? Phase::kDecoding : phase)];
}

const Scheduler::RequestQueue& Scheduler::QueueOf(Phase phase) const {
  return const_cast<Scheduler*>(this)->QueueOf(phase);
}

bool Scheduler::IsReadyUngranted(const Request& request) const {
  return config_.role == Role::kPrefill && !request.is_granted && HoldingsOf(request.state) != nullptr;
}

}  // namespace pdmesh
