// The reading half of the scheduler: gauges, tables and dumps. Changes nothing.
#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/prefix/prefix_hasher.h"
#include "scheduler/scheduler.h"
#include "support/errors.h"

namespace pdmesh {

std::vector<std::vector<std::int32_t>> Scheduler::BlockTablesOf(const std::string& request_id) const {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) {
    throw ContractError("block tables of request \"" + request_id + "\": it is not live");
  }
  std::vector<std::vector<std::int32_t>> tables(static_cast<std::size_t>(coordinator_.num_groups()));
  if (const std::vector<BlockTable>* held = TablesOf(found->second->state)) {
    for (std::size_t group = 0; group < tables.size(); ++group) {
      const std::span<const std::int32_t> block_ids = (*held)[group].block_ids();
      tables[group].assign(block_ids.begin(), block_ids.end());
    }
  }
  return tables;
}

std::int32_t Scheduler::FindCachedTokens(std::span<const std::int32_t> tokens,
                                         std::vector<std::string> extra_keys) const {
  if (!config_.enable_prefix_cache || tokens.empty()) {
    return 0;
  }
  // The last prompt token is never taken from the cache.
  const auto num_grains =
      static_cast<std::int32_t>((static_cast<std::int64_t>(tokens.size()) - 1) / config_.prefix_granularity);
  GrainChain chain(config_.prefix_granularity, std::move(extra_keys));
  chain.ExtendTo(tokens, num_grains);
  const PrefixProbe probe = coordinator_.ProbePrefix(chain.digests(), num_grains, ProbeScope::kAllGroups);
  return static_cast<std::int32_t>(probe.hit_tokens);
}

namespace {

std::vector<GroupOccupancy> OccupanciesOf(const BlockPool& pool) {
  std::vector<GroupOccupancy> groups;
  groups.reserve(static_cast<std::size_t>(pool.num_groups()));
  for (std::int32_t group = 0; group < pool.num_groups(); ++group) {
    const std::int64_t taken = pool.num_taken(group);
    const std::int64_t bound = (taken + pool.num_free_slots(group)) / pool.cache_blocks_per_lcm_block(group);
    groups.push_back({.lcm_blocks = static_cast<std::int32_t>(bound),
                      .cached_lcm_blocks = pool.num_watched_only_lcm_blocks(group),
                      .taken_blocks = taken});
  }
  return groups;
}

}  // namespace

Capacity Scheduler::capacity() const {
  const std::int32_t total = coordinator_.pool().num_lcm_blocks();
  const std::int32_t empty = coordinator_.pool().num_empty_lcm_blocks();
  const std::int32_t cached = coordinator_.num_cached_lcm_blocks();
  const auto quarantined = static_cast<std::int32_t>(num_quarantined_children_.size());
  const auto size_of = [this](Phase phase) { return static_cast<std::int32_t>(QueueOf(phase).size()); };
  const std::int32_t waiting =
      size_of(Phase::kAwaitingReady) + size_of(Phase::kWaiting) +
      (&QueueOf(Phase::kRetracted) == &QueueOf(Phase::kWaiting) ? 0 : size_of(Phase::kRetracted));
  const std::int32_t live = static_cast<std::int32_t>(requests_.size()) - size_of(Phase::kFinished);
  return {.total_lcm_blocks = total,
          .empty_lcm_blocks = empty,
          .active_lcm_blocks = total - empty - cached - quarantined,
          .cached_lcm_blocks = cached,
          .quarantined_lcm_blocks = quarantined,
          .num_waiting = waiting,
          .num_running = live - waiting - size_of(Phase::kTransferHeld) - size_of(Phase::kQuarantined),
          .num_live_requests = live,
          .host = coordinator_.host_capacity(),
          .groups = OccupanciesOf(coordinator_.pool())};
}

std::string Scheduler::Describe() const {
  const Capacity gauges = capacity();
  std::string out = std::string("role ") + NameOf(config_.role) + " prefix_granularity " +
                    std::to_string(config_.prefix_granularity) + "\n";
  out += "lcm_blocks total=" + std::to_string(gauges.total_lcm_blocks) +
         " empty=" + std::to_string(gauges.empty_lcm_blocks) +
         " active=" + std::to_string(gauges.active_lcm_blocks) +
         " cached=" + std::to_string(gauges.cached_lcm_blocks) +
         " quarantined=" + std::to_string(gauges.quarantined_lcm_blocks) + "\n";
  if (coordinator_.has_host_tier()) {
    out += "host_lcm_blocks total=" + std::to_string(gauges.host.total_lcm_blocks) +
           " empty=" + std::to_string(gauges.host.empty_lcm_blocks) +
           " active=" + std::to_string(gauges.host.active_lcm_blocks) +
           " cached=" + std::to_string(gauges.host.cached_lcm_blocks) + "\n";
  }
  if (const StorageShadow* shadow = coordinator_.shadow()) {
    out += "storage keys=" + std::to_string(shadow->num_keys()) +
           " unreadable=" + std::to_string(shadow->num_unreadable_keys()) + "\n";
  }
  if (const AgedFrequency* policy = coordinator_.aged_frequency()) {
    out += std::string("eviction ") + NameOf(config_.eviction_policy) +
           " level=" + std::to_string(policy->level()) + " ghosts=" + std::to_string(policy->num_ghosts()) +
           "\n";
  }
  for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
    const CacheGroup& described = coordinator_.group(group);
    out += "group " + described.spec.group_id +
           " free_slots=" + std::to_string(coordinator_.pool().num_free_slots(group)) +
           " entries=" + std::to_string(described.index.num_entries()) +
           " evictable=" + std::to_string(described.index.num_evictable());
    if (const HostTier* host = coordinator_.host()) {
      out += " host_entries=" + std::to_string(host->index(group).num_entries());
    }
    if (!described.is_closed()) {
      out += " promised=" + std::to_string(coordinator_.reserve().num_promised(group)) +
             " kept=" + std::to_string(coordinator_.reserve().num_kept(group));
    }
    out += "\n";
  }
  std::set<const Request*, BySubmission> by_age;
  for (const RequestQueue& queue : queues_) {
    by_age.insert(queue.begin(), queue.end());
  }
  for (const Request* request : by_age) {
    DescribeRequest(*request, out);
  }
  return out;
}

void Scheduler::DescribeRequest(const Request& request, std::string& out) const {
  out += "request " + request.request_id + " " + NameOf(request.phase()) +
         " tokens=" + std::to_string(request.num_prompt_tokens) + "+" +
         std::to_string(request.num_tokens() - request.num_prompt_tokens);
  if (request.num_retractions > 0) {
    out += " retractions=" + std::to_string(request.num_retractions);
  }
  if (const Holdings* holdings = HoldingsOf(request.state)) {
    out += " slot=" + std::to_string(holdings->slot.slot()) +
           " hit=" + std::to_string(holdings->num_hit_tokens) +
           " computed=" + std::to_string(holdings->num_computed_tokens) +
           " published_grains=" + std::to_string(holdings->num_published_grains);
    if (!holdings->is_secured) {
      out += " unsecured";
    }
    if (holdings->promotion_tokens > 0) {
      out += " promotion=" + std::to_string(holdings->promotion_tokens);
    }
  }
  if (const std::int32_t num_results_out = request.num_results_out(); num_results_out > 0) {
    out += " results_out=" + std::to_string(num_results_out);
  }
  out += "\n";
  const std::vector<BlockTable>* tables = TablesOf(request.state);
  if (tables == nullptr) {
    return;
  }
  for (std::int32_t group = 0; group < coordinator_.num_groups(); ++group) {
    const BlockTable& table = (*tables)[static_cast<std::size_t>(group)];
    out += "  " + coordinator_.group(group).spec.group_id + ":";
    for (const std::int32_t block_id : table.block_ids()) {
      out += " " + (block_id == kNullBlockId ? std::string("-") : std::to_string(block_id));
    }
    out += " | room " + std::to_string(table.tail_room()) + "\n";
  }
}

}  // namespace pdmesh
