// Reads any bytes as a configuration and a conversation with a scheduler, nonsense included.
//
// Whatever is refused must leave no trace, gauges must add up after every step, and once everything has ended
// the cache can be cleared down to the last parent. A finding ends the process.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

void Require(bool holds, const char* what, const std::string& details = {}) {
  if (!holds) {
    std::fprintf(stderr, "finding: %s\n%s\n", what, details.c_str());
    std::abort();
  }
}

// Hands out the bytes one by one; behind the last one come zeros.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  bool is_used_up() const { return next_ == end_; }
  std::int32_t Byte() { return next_ == end_ ? 0 : *next_++; }
  std::int32_t Below(std::int32_t limit) { return Byte() % limit; }
  bool OneIn(std::int32_t count) { return Below(count) == count - 1; }
  template <typename Value>
  Value Of(std::initializer_list<Value> choices) {
    return choices.begin()[static_cast<std::size_t>(Below(static_cast<std::int32_t>(choices.size())))];
  }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

CacheGroupConfig GroupOf(Input& input, std::int32_t prefix_granularity, std::size_t position) {
  const bool is_absurd = input.OneIn(32);
  CacheGroupConfig group{
      .group_id = std::string(1, static_cast<char>('a' + (is_absurd ? 0 : position))),
      .family = Family::kHistory,
      .retention = Retention::kFullHistory,
      .block_granularity =
          is_absurd ? input.Of({-1, 0, 3, 1 << 30}) : std::max(1, prefix_granularity / input.Of({1, 2, 4})),
      .cache_blocks_per_lcm_block = is_absurd ? input.Of({0, -1, 1 << 30, 2}) : input.Of({1, 2, 3, 4, 8}),
      .sliding_window_tokens = {},
  };
  switch (input.Below(5)) {
    case 3:
      group.family = Family::kState;
      break;
    case 4:
      group.retention = Retention::kSlidingWindow;
      group.sliding_window_tokens = 1 + input.Below(12) - (is_absurd ? 2 : 0);
      group.replayable = input.OneIn(4);
      break;
    default:
      break;
  }
  if (input.OneIn(6)) {
    group.shard_count = input.Of({2, 4, 2, 0});
  }
  return group;
}

SchedulerConfig ConfigOf(Input& input) {
  SchedulerConfig config{
      .role = input.Of({Role::kFused, Role::kPrefill, Role::kDecode}),
      .prefix_granularity = input.OneIn(64) ? 0 : input.Of({4, 4, 8, 1, 2, 4, 8}),
      .num_lcm_blocks = 1 + input.Below(input.OneIn(4) ? 8 : 64),
      .max_batch_size = input.OneIn(64) ? 0 : input.Of({1, 2, 3, 4, 4, 8}),
      .token_budget = input.Below(input.OneIn(4) ? 64 : 128),
      .cache_groups = {},
      .enable_prefix_cache = !input.OneIn(8),
      .max_ready_ungranted = input.OneIn(64) ? 0 : input.Of({64, 1, 2, 3}),
      .verify_width = input.OneIn(3) ? input.Below(6) : 1,
      .overlap_depth = input.OneIn(3)    ? 1
                       : input.OneIn(32) ? 2
                                         : 0,
      .eviction_policy = input.Of({EvictionPolicy::kLru, EvictionPolicy::kAgedFrequency}),
      .enable_prefix_events = input.OneIn(2),
      .num_host_lcm_blocks = input.OneIn(3) ? input.Below(24) : 0,
  };
  config.enable_storage = input.OneIn(config.num_host_lcm_blocks > 0 ? 2 : 64);
  const std::int32_t num_groups = input.OneIn(32) ? 0 : 1 + input.Below(4);
  for (std::int32_t position = 0; position < num_groups; ++position) {
    config.cache_groups.push_back(
        GroupOf(input, config.prefix_granularity, static_cast<std::size_t>(position)));
  }
  return config;
}

using OwnedEvent = std::variant<ResultEvent, FinishEvent, AbortEvent, ReadyEvent, GrantedEvent, DoneEvent,
                                HandedOverEvent, FailedEvent, QuiescedEvent, ReserveEvent, RetractEvent>;

class Conversation {
 public:
  Conversation(const SchedulerConfig& config, Input& input)
      : config_(config), input_(input), scheduler_(config) {}

  void Go() {
    while (!input_.is_used_up()) {
      Step();
      CheckGauges();
    }
    ComeToRest();
  }

 private:
  static constexpr std::int32_t kNumIds = 12;

  void Step() {
    switch (input_.Below(18)) {
      case 0:
      case 1:
      case 2:
        Submit();
        break;
      case 3:
      case 4:
      case 5:
      case 6:
        Plan_();
        break;
      case 7:
      case 8:
      case 9:
        Land();
        break;
      case 10:
        Require(scheduler_.CanClear() == scheduler_.ClearCache(),
                "CanClear does not say what ClearCache does");
        break;
      case 11:
        Drain();
        break;
      case 12:
        ReadTables();
        break;
      case 13:
        AnswerAll();
        break;
      case 14:
        Acknowledge();
        break;
      case 15:
        AskStorage();
        break;
      default:
        Advance(AnyEvents());
        break;
    }
  }

  std::string AnyId() { return input_.OneIn(24) ? "" : std::to_string(input_.Below(kNumIds)); }

  std::optional<std::int32_t> AnyLength() {
    if (input_.OneIn(5)) {
      return std::nullopt;
    }
    return input_.OneIn(32) ? std::numeric_limits<std::int32_t>::max()
                            : input_.Below(9) - (input_.OneIn(16) ? 2 : 0);
  }

  RequestSpec AnyRequest() {
    RequestSpec spec{.request_id = AnyId(),
                     .tokens = {},
                     .max_new_tokens = AnyLength(),
                     .extra_keys = {},
                     .local_prefill = input_.OneIn(4)};
    const std::int32_t num_tokens = input_.OneIn(32) ? 0 : 1 + input_.Below(40);
    const std::int32_t stem = input_.Of({0, 0, 100, 200});
    for (std::int32_t token = 0; token < num_tokens; ++token) {
      spec.tokens.push_back(token + (token < 8 ? 0 : stem));
    }
    if (input_.OneIn(24) && !spec.tokens.empty()) {
      spec.tokens.back() = -1;
    }
    if (input_.OneIn(6)) {
      spec.extra_keys.emplace_back("key");
    }
    return spec;
  }

  void Submit() {
    std::vector<RequestSpec> specs;
    for (std::int32_t count = input_.OneIn(4) ? 2 : 1; count > 0; --count) {
      specs.push_back(AnyRequest());
    }
    LeavesNoTraceIfRefused([&] { scheduler_.Submit(specs); });
  }

  void Plan_() {
    const Plan plan = scheduler_.NextPlan();
    NoteTransfers(plan);
    Require(plan.num_rows <= config_.max_batch_size, "more rows than fit a batch");
    for (std::size_t row = 0; row < plan.request_ids.size(); ++row) {
      owed_.push_back({.request_id = plan.request_ids[row], .tokens = {}});
      const bool is_decode = static_cast<std::int32_t>(row) >= plan.num_prefill_rows;
      const std::int32_t num_tokens =
          is_decode ? 1 + input_.Below(std::max(1, plan.input_lengths[row])) : plan.logits_wanted[row];
      owed_.back().tokens.resize(static_cast<std::size_t>(num_tokens), static_cast<std::int32_t>(row));
    }
  }

  // The results of what was planned, all or some, in the order of the plans.
  void Land() {
    std::deque<OwnedEvent> events;
    const std::size_t count = input_.OneIn(3) ? owed_.size() / 2 : owed_.size();
    for (std::size_t i = 0; i < count; ++i) {
      events.emplace_back(owed_[i]);
    }
    owed_.erase(owed_.begin(), owed_.begin() + static_cast<std::ptrdiff_t>(count));
    Advance(events);
  }

  // What a quick peer says of every request; where it makes no sense it is ignored or refused.
  void AnswerAll() {
    const std::int32_t token = input_.Below(8);
    for (std::int32_t number = 0; number < kNumIds; ++number) {
      const std::string id = std::to_string(number);
      if (config_.role == Role::kDecode) {
        Advance({ReadyEvent{.request_id = id}});
        Advance({DoneEvent{.request_id = id, .token = token}});
      } else if (config_.role == Role::kPrefill) {
        Advance({GrantedEvent{.request_id = id}});
      }
    }
  }

  std::deque<OwnedEvent> AnyEvents() {
    std::deque<OwnedEvent> events;
    for (std::int32_t count = input_.OneIn(3) ? 2 : 1; count > 0; --count) {
      events.push_back(AnyEvent());
    }
    return events;
  }

  OwnedEvent AnyEvent() {
    std::string id = AnyId();
    switch (input_.Below(14)) {
      case 0:
        return ResultEvent{.request_id = std::move(id), .tokens = AnyTokens()};
      case 1:
        return FinishEvent{.request_id = std::move(id)};
      case 2:
        return AbortEvent{.request_id = std::move(id)};
      case 3:
      case 4:
        return ReadyEvent{.request_id = std::move(id)};
      case 5:
        return GrantedEvent{.request_id = std::move(id)};
      case 6:
      case 7:
        return DoneEvent{.request_id = std::move(id), .token = input_.Below(8) - (input_.OneIn(8) ? 2 : 0)};
      case 8:
        return HandedOverEvent{.request_id = std::move(id)};
      case 9:
        return FailedEvent{.request_id = std::move(id)};
      case 10:
        return ReserveEvent{.request_id = std::move(id), .num_tokens = input_.Below(12)};
      case 11:
        return RetractEvent{.request_id = std::move(id)};
      default:
        return QuiescedEvent{.request_id = std::move(id)};
    }
  }

  std::vector<std::int32_t> AnyTokens() {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(input_.Below(3)), 7);
    if (!tokens.empty() && input_.OneIn(8)) {
      tokens.back() = -1;
    }
    return tokens;
  }

  // False if the scheduler refused them.
  bool Advance(const std::deque<OwnedEvent>& events) {
    std::vector<AnyEventView> views;
    for (const OwnedEvent& event : events) {
      views.push_back(std::visit([](const auto& value) -> AnyEventView { return EventView(&value); }, event));
    }
    return LeavesNoTraceIfRefused([&] { scheduler_.Advance(views); });
  }

  template <typename Call>
  bool LeavesNoTraceIfRefused(const Call& call) {
    const std::string before = scheduler_.Describe();
    try {
      call();
      return true;
    } catch (const SubmitError&) {
    } catch (const ContractError&) {
    }
    const std::string after = scheduler_.Describe();
    Require(before == after, "a refused call left a trace", before + "now\n" + after);
    return false;
  }

  void Drain() {
    for (const PrefixEvent& event : scheduler_.DrainPrefixEvents()) {
      if (const auto* stored = std::get_if<PrefixStored>(&event)) {
        Require(announced_.insert(stored->hash).second, "a prefix was stored twice");
        Require(static_cast<std::int32_t>(stored->tokens.size()) == config_.prefix_granularity,
                "a stored prefix is no grain");
      } else if (const auto* removed = std::get_if<PrefixRemoved>(&event)) {
        Require(announced_.erase(removed->hash) == 1, "a prefix was removed that was not stored");
      } else {
        announced_.clear();
      }
    }
  }

  void ReadTables() {
    LeavesNoTraceIfRefused([&] {
      const auto tables = scheduler_.BlockTablesOf(AnyId());
      Require(tables.size() == config_.cache_groups.size(), "not one table per group");
    });
  }

  void NoteTransfers(const Plan& plan) {
    for (const StoreOperation& store : plan.stores) {
      Require(!store.copies.empty(), "a store copies nothing");
      stores_.push_back(store.operation_id);
    }
    for (const LoadOperation& load : plan.loads) {
      Require(!load.copies.empty(), "a load copies nothing");
      loads_.push_back({.operation_id = load.operation_id, .missed = load.keys});
    }
  }

  // A transfer that is under way or was; a load may fail too late, which is refused.
  void Acknowledge() {
    if (!stores_.empty()) {
      const StoreDoneEvent done{.operation_id = OneOf(stores_), .created = {}};
      Require(LeavesNoTraceIfRefused([&] { scheduler_.Advance(Transfer(&done)); }), "a store was not done");
    }
    if (!loads_.empty()) {
      LoadDoneEvent done = OneOf(loads_);
      done.success = !input_.OneIn(4);
      LeavesNoTraceIfRefused([&] { scheduler_.Advance(Transfer(&done)); });
    }
  }

  template <typename Value>
  const Value& OneOf(const std::vector<Value>& values) {
    return values[static_cast<std::size_t>(input_.Below(static_cast<std::int32_t>(values.size())))];
  }

  // Storage has the front of what it is asked for.
  void AskStorage() {
    std::vector<CacheKey> keys = scheduler_.StorageQueries();
    const std::int32_t num_found = input_.Below(static_cast<std::int32_t>(keys.size()) + 1);
    keys.erase(keys.begin() + num_found, keys.end());
    scheduler_.RegisterStorageKeys(keys);
    if (input_.OneIn(4)) {
      scheduler_.UnregisterStorageKeys(keys);
    }
  }

  template <typename Event>
  static std::vector<AnyEventView> Transfer(const Event* event) {
    return {TransferEventView(event)};
  }

  void CheckGauges() {
    const Capacity gauges = scheduler_.capacity();
    Require(gauges.empty_lcm_blocks >= 0 && gauges.active_lcm_blocks >= 0 && gauges.cached_lcm_blocks >= 0 &&
                gauges.quarantined_lcm_blocks >= 0,
            "a gauge is negative", scheduler_.Describe());
    Require(gauges.total_lcm_blocks == config_.num_lcm_blocks, "parents appeared or vanished");
    Require(gauges.num_waiting >= 0 && gauges.num_running >= 0 &&
                gauges.num_waiting + gauges.num_running <= gauges.num_live_requests,
            "requests are counted wrongly", scheduler_.Describe());
  }

  void ComeToRest() {
    for (std::int32_t number = 0; number < kNumIds; ++number) {
      const std::string id = std::to_string(number);
      Require(Advance({AbortEvent{.request_id = id}}), "an abort was refused", scheduler_.Describe());
      if (config_.role != Role::kFused) {
        Require(Advance({QuiescedEvent{.request_id = id}}), "a quiet peer was refused",
                scheduler_.Describe());
      }
    }
    NoteTransfers(scheduler_.NextPlan());
    for (const std::uint64_t operation_id : stores_) {
      const StoreDoneEvent done{.operation_id = operation_id, .created = {}};
      scheduler_.Advance(Transfer(&done));
    }
    for (const LoadDoneEvent& load : loads_) {
      scheduler_.Advance(Transfer(&load));
    }
    Require(scheduler_.capacity().num_live_requests == 0, "a request outlived its end",
            scheduler_.Describe());
    Require(scheduler_.ClearCache(), "an idle scheduler could not be cleared", scheduler_.Describe());
    Require(scheduler_.capacity().empty_lcm_blocks == config_.num_lcm_blocks,
            "a cleared scheduler holds blocks", scheduler_.Describe());
    Require(scheduler_.capacity().host.empty_lcm_blocks == config_.num_host_lcm_blocks,
            "a cleared host holds blocks", scheduler_.Describe());
    Drain();
    Require(announced_.empty(), "a cleared cache is announced");
  }

  const SchedulerConfig config_;
  Input& input_;
  Scheduler scheduler_;
  std::vector<ResultEvent> owed_;
  std::vector<std::uint64_t> stores_;  // all that ever began
  std::vector<LoadDoneEvent> loads_;
  std::set<std::uint64_t> announced_;
};

}  // namespace
}  // namespace pdmesh

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pdmesh::Input input(data, size);
  const pdmesh::SchedulerConfig config = pdmesh::ConfigOf(input);
  try {
    config.Validate();
  } catch (const pdmesh::ConfigError&) {
    return 0;
  }
  pdmesh::Conversation(config, input).Go();
  return 0;
}
