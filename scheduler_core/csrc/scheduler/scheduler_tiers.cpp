// The tiers below the device: transfers of a plan and their acknowledgements, and what storage is asked for.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

void FillOperation(TransferOperation& operation, std::uint64_t operation_id,
                   const std::vector<TierCopy>& copies) {
  operation.operation_id = operation_id;
  operation.copies.reserve(copies.size() * 3);
  operation.keys.reserve(copies.size());
  for (const TierCopy& copy : copies) {
    operation.copies.insert(operation.copies.end(),
                            {copy.group, copy.source_block_id, copy.destination_block_id});
    operation.keys.push_back(copy.key);
  }
}

bool CanBeGivenUp(Phase phase) {
  return phase == Phase::kPrefilling || phase == Phase::kAwaitingResult || phase == Phase::kPrefillDone ||
         phase == Phase::kDecoding;
}

}  // namespace

void Scheduler::StartTransfers(Round& round) {
  if (!coordinator_.has_host_tier()) {
    return;
  }
  const PlannedTransfers planned = coordinator_.StartTransfers(std::exchange(holds_stores_back_, false));
  for (const PlannedStore& store : planned.stores) {
    StoreOperation& operation = round.plan().stores.emplace_back();
    operation.is_pinned = store.is_pinned;
    FillOperation(operation, store.operation_id, store.copies);
  }
  loading_plan_ = {};
  if (!planned.load) {
    return;
  }
  LoadOperation& operation = round.plan().loads.emplace_back();
  FillOperation(operation, planned.load->operation_id, planned.load->copies);
  for (const TierCopy& copy : planned.load->copies) {
    operation.reads_storage.push_back(copy.reads_storage ? 1 : 0);
  }
  Ensure(round.plan().remote_prefills.empty(), "a peer was asked beside a load");
  loading_plan_.operation_id = planned.load->operation_id;
  if (!planned_readings_.empty()) {
    readings_.emplace(planned.load->operation_id, std::exchange(planned_readings_, {}));
  }
  round.ForEachRow([this](const Request& request) {
    loading_plan_.requests.emplace_back(request.request_id, request.submission);
  });
}

// Nothing of the plan ran, so its requests start over from what they had before.
void Scheduler::JudgeFailedLoad(const LoadDoneEvent& failed, std::vector<JudgedChange>& to_apply) {
  if (!coordinator_.IsLoadUnderWay(failed.operation_id)) {
    return;
  }
  const std::string event = "event load_done of operation " + std::to_string(failed.operation_id) + ": ";
  if (failed.operation_id != loading_plan_.operation_id) {
    throw ContractError(event + "a failure must be reported before the next plan is asked for");
  }
  for (const auto& [request_id, submission] : loading_plan_.requests) {
    const auto found = requests_.find(request_id);
    if (found == requests_.end() || found->second->submission != submission) {
      continue;
    }
    PhaseView& view = JudgedView(*found->second);
    if (!CanBeGivenUp(view.phase)) {
      continue;  // it ended in the meantime
    }
    if (view.results_out.num() != 1) {
      throw ContractError(event + "request \"" + request_id + "\" has " +
                          std::to_string(view.results_out.num()) +
                          " results out, that of the failed plan must be the only one");
    }
    view = {.phase = Phase::kRetracted,
            .is_remote = view.is_remote,
            .results_out = {},
            .num_wanted_tokens = view.num_wanted_tokens};
    to_apply.emplace_back(GivenUp{.request = found->second.get()});
  }
}

void Scheduler::ApplyTransferEvent(const TransferEventView& event) {
  if (const auto* store = std::get_if<const StoreDoneEvent*>(&event)) {
    coordinator_.CompleteStore((*store)->operation_id, (*store)->created);
    return;
  }
  const LoadDoneEvent& load = *std::get<const LoadDoneEvent*>(event);
  coordinator_.CompleteLoad(load.operation_id, load.success, load.missed);
  const auto readings = readings_.extract(load.operation_id);
  if (readings.empty() || !load.success) {
    return;
  }
  for (const Reading& reading : readings.mapped()) {
    if (!reading.is_announced) {
      prefix_events_->LeaveOutOnly(reading.digests);
      continue;
    }
    std::vector<std::uint64_t> hashes;
    prefix_events_->DescribeOnly(reading.digests, reading.tokens, hashes);
  }
}

std::vector<CacheKey> Scheduler::StorageQueries() {
  std::vector<CacheKey> keys;
  if (coordinator_.shadow() == nullptr) {
    return keys;
  }
  std::unordered_set<CacheKey, CacheKeyHash> asked;
  for (Request* request : LikelyAdmissions()) {
    const std::int32_t num_grains = NumGrainsToMatch(*request);
    request->chain.ExtendTo(request->tokens, num_grains);
    for (const CacheKey& key : coordinator_.StorageKeysFor(request->chain.digests(), num_grains)) {
      if (asked.insert(key).second) {
        keys.push_back(key);
      }
    }
  }
  return keys;
}

// Local prompts in their turn, as far as rows, tokens and memory of the next plan reach. No prefix is looked
// at, so one that would fit only behind its hits is left out, and one whose hits leave room for the next is
// taken to need all.
std::vector<Request*> Scheduler::LikelyAdmissions() const {
  PlanRoom room = RoomForNewPrompts();
  std::vector<Request*> likely;
  const auto add = [&](Request& request) {
    if (!request.is_remote && !request.IsComplete() &&
        !IsStillBlocked(request, /*is_local=*/true, static_cast<std::int32_t>(room.num_budget_tokens)) &&
        CouldAdmitBeside(request, room.demands)) {
      likely.push_back(&request);
      --room.num_rows;
      room.num_budget_tokens -= request.num_prompt_tokens;
    }
  };
  if (Request* readmission = NextReadmission(); readmission != nullptr && room.num_rows > 0) {
    add(*readmission);
    return likely;
  }
  for (Request* request : QueueOf(Phase::kWaiting)) {
    if (room.num_rows <= 0 || room.num_budget_tokens <= 0) {
      break;
    }
    add(*request);
  }
  return likely;
}

// What residents leave of the next plan.
Scheduler::PlanRoom Scheduler::RoomForNewPrompts() const {
  PlanRoom room{.num_rows = slots_.num_free_slots(), .num_budget_tokens = config_.token_budget};
  std::int64_t num_resident_rows = 0;
  for (const Request* request : QueueOf(Phase::kPrefilling)) {
    if (!CanTakeRow(*request)) {
      return {};
    }
    ++num_resident_rows;
    room.num_budget_tokens -= request->num_prompt_tokens - HoldingsOf(request->state)->num_computed_tokens;
  }
  switch (config_.role) {
    case Role::kPrefill:
      room.num_rows =
          std::min<std::int64_t>(room.num_rows, config_.max_ready_ungranted - num_ready_ungranted_);
      break;
    case Role::kDecode:  // one prompt, alone
      room.num_rows = num_resident_rows > 0 ? 0 : std::min<std::int64_t>(room.num_rows, 1);
      break;
    case Role::kFused:
      for (const Request* request : QueueOf(Phase::kDecoding)) {
        if (DecodeWidth(*request) > 0) {
          ++num_resident_rows;
          room.num_budget_tokens -= DecodeCostTokens();
        }
      }
      break;
  }
  room.num_rows = std::min(room.num_rows, config_.max_batch_size - num_resident_rows);
  return room;
}

// Adds what the request asks for without hits to the demands of those before it, if there could be room for
// all of them.
bool Scheduler::CouldAdmitBeside(const Request& request, std::vector<GroupDemand>& demands) const {
  std::vector<GroupDemand> sum =
      capacity_model_.FirstDemands(SpanOf(request, 0, request.num_prompt_tokens, /*is_local=*/true));
  for (std::size_t group = 0; group < demands.size(); ++group) {
    sum[group].num_promised_blocks += demands[group].num_promised_blocks;
    if (auto* growth = std::get_if<DenseGrowth>(&sum[group].extent)) {
      const auto& before = std::get<DenseGrowth>(demands[group].extent);
      growth->extent_tokens += before.extent_tokens;
      growth->reserve_tokens += before.reserve_tokens;
    }
  }
  if (!coordinator_.CouldAdmit(sum)) {
    return false;
  }
  demands = std::move(sum);
  return true;
}

void Scheduler::RegisterStorageKeys(std::span<const CacheKey> keys) {
  CheckKeys(keys);
  coordinator_.RegisterStorageKeys(keys);
}

void Scheduler::UnregisterStorageKeys(std::span<const CacheKey> keys) {
  CheckKeys(keys);
  coordinator_.UnregisterStorageKeys(keys);
}

void Scheduler::CheckKeys(std::span<const CacheKey> keys) const {
  for (const CacheKey& key : keys) {
    const bool is_known_group = key.group >= 0 && key.group < coordinator_.num_groups();
    const std::int32_t num_offsets = is_known_group ? coordinator_.group(key.group).keys.slots_per_grain : 0;
    if (key.grain_offset < 0 || key.grain_offset >= num_offsets) {
      throw ContractError("storage key of group " + std::to_string(key.group) + " at grain_offset " +
                          std::to_string(key.grain_offset) + ": no block can have it");
    }
  }
}

}  // namespace pdmesh
