#include "scheduler/config.h"

#include <algorithm>
#include <limits>
#include <set>

#include "support/errors.h"

namespace pdmesh {
namespace {

[[noreturn]] void Refuse(const std::string& message) {
  throw ConfigError(message);
}

void RequireAtLeast(const std::string& field, std::int64_t value, std::int64_t limit) {
  if (value < limit) {
    Refuse(field + " must be at least " + std::to_string(limit) + ", got " + std::to_string(value));
  }
}

// A group is one of three kinds: full history, sliding history, state.
void ValidateKind(const std::string& name, const CacheGroupConfig& group) {
  const bool is_sliding = group.retention == Retention::kSlidingWindow;
  if (group.family == Family::kState && is_sliding) {
    Refuse(name + ".retention: a state group keeps its whole history, sliding_window is refused");
  }
  if (is_sliding != group.sliding_window_tokens.has_value()) {
    Refuse(name + ".sliding_window_tokens must be given exactly when retention is sliding_window");
  }
  if (is_sliding) {
    RequireAtLeast(name + ".sliding_window_tokens", *group.sliding_window_tokens, 1);
  }
  if (group.replayable && !is_sliding) {
    Refuse(name + ".replayable is legal on sliding history groups only");
  }
}

void ValidateGroup(const SchedulerConfig& config, const CacheGroupConfig& group) {
  const std::string name = "cache_groups[\"" + group.group_id + "\"]";
  if (group.group_id.empty()) {
    Refuse("cache_groups: group_id must not be empty");
  }
  RequireAtLeast(name + ".block_granularity", group.block_granularity, 1);
  if (config.prefix_granularity % group.block_granularity != 0) {
    Refuse(name + ".block_granularity " + std::to_string(group.block_granularity) +
           " must divide prefix_granularity " + std::to_string(config.prefix_granularity));
  }
  RequireAtLeast(name + ".cache_blocks_per_lcm_block", group.cache_blocks_per_lcm_block, 1);
  RequireAtLeast(name + ".shard_count", group.shard_count, 1);
  ValidateKind(name, group);
  if (group.cache_blocks_per_lcm_block % group.shard_count != 0) {
    Refuse(name + ".shard_count " + std::to_string(group.shard_count) +
           " must divide cache_blocks_per_lcm_block " + std::to_string(group.cache_blocks_per_lcm_block) +
           ", which counts the blocks of all shards");
  }
  if (group.family == Family::kState && config.token_budget < config.prefix_granularity) {
    Refuse("token_budget " + std::to_string(config.token_budget) + " must be at least prefix_granularity " +
           std::to_string(config.prefix_granularity) + " beside the state group " + name +
           ", whose chunks end on grain boundaries");
  }
}

void ValidateBlockIds(const CacheGroupConfig& group, const std::string& field, std::int32_t num_lcm_blocks) {
  const std::int64_t num_slots =
      (std::int64_t{num_lcm_blocks} + 1) * std::int64_t{group.cache_blocks_per_lcm_block};
  if (num_slots > std::numeric_limits<std::int32_t>::max()) {
    Refuse("cache_groups[\"" + group.group_id + "\"].cache_blocks_per_lcm_block " +
           std::to_string(group.cache_blocks_per_lcm_block) + " with " + field + " " +
           std::to_string(num_lcm_blocks) + " exceeds int32 block ids");
  }
}

// A hit is followed by a replayed window, and no last chunk may be shorter than one, so two must fit a round.
void ValidateReplay(const SchedulerConfig& config) {
  const std::int64_t replay_tokens = config.replay_window_tokens();
  if (replay_tokens == 0) {
    return;
  }
  for (const CacheGroupConfig& group : config.cache_groups) {
    if (group.family == Family::kState) {
      Refuse("cache_groups[\"" + group.group_id +
             "\"].family: a state group cannot stand beside a replayable group");
    }
  }
  const std::int64_t needed_tokens =
      replay_tokens + std::max<std::int64_t>(replay_tokens, config.prefix_granularity);
  if (config.token_budget < needed_tokens) {
    Refuse("token_budget " + std::to_string(config.token_budget) + " must be at least " +
           std::to_string(needed_tokens) + " beside a replayable window of " + std::to_string(replay_tokens) +
           " tokens");
  }
}

AttentionKind KindOf(const CacheGroupConfig& group) {
  if (group.family == Family::kState) {
    return AttentionKind::kState;
  }
  return group.retention == Retention::kSlidingWindow ? AttentionKind::kSlidingWindow : AttentionKind::kFull;
}

}  // namespace

void SchedulerConfig::ValidateSizing() const {
  RequireAtLeast("prefix_granularity", prefix_granularity, 1);
  RequireAtLeast("max_batch_size", max_batch_size, 1);
  RequireAtLeast("token_budget", token_budget, 1);
  RequireAtLeast("max_ready_ungranted", max_ready_ungranted, 1);
  RequireAtLeast("verify_width", verify_width, 1);
  RequireAtLeast("num_host_lcm_blocks", num_host_lcm_blocks, 0);
  if (enable_storage && num_host_lcm_blocks == 0) {
    Refuse("enable_storage needs a host tier, num_host_lcm_blocks is 0");
  }
  if (role == Role::kFused && token_budget < verify_width) {
    Refuse("token_budget " + std::to_string(token_budget) + " must be at least verify_width " +
           std::to_string(verify_width) + ", which every decode row takes of it");
  }
  if (overlap_depth != 0 && overlap_depth != 1) {
    Refuse("overlap_depth must be 0 or 1, got " + std::to_string(overlap_depth));
  }
  if (eviction_policy != EvictionPolicy::kLru && eviction_policy != EvictionPolicy::kAgedFrequency) {
    Refuse("eviction_policy must be lru or aged_frequency, got " +
           std::to_string(static_cast<int>(eviction_policy)));
  }
  if (eviction_policy != EvictionPolicy::kLru && !enable_prefix_cache) {
    Refuse("eviction_policy " + std::string(NameOf(eviction_policy)) +
           " needs enable_prefix_cache: without it nothing is ever evicted");
  }
  if (enable_prefix_events && !enable_prefix_cache) {
    Refuse("enable_prefix_events needs enable_prefix_cache: without it there is nothing to announce");
  }
  if (cache_groups.empty()) {
    Refuse("cache_groups must name at least one group");
  }
  ValidateReplay(*this);
  std::set<std::string> group_ids;
  for (const CacheGroupConfig& group : cache_groups) {
    ValidateGroup(*this, group);
    if (!group_ids.insert(group.group_id).second) {
      Refuse("cache_groups: group_id \"" + group.group_id + "\" is given twice");
    }
  }
}

void SchedulerConfig::Validate() const {
  ValidateSizing();
  RequireAtLeast("num_lcm_blocks", num_lcm_blocks, 1);
  for (const CacheGroupConfig& group : cache_groups) {
    ValidateBlockIds(group, "num_lcm_blocks", num_lcm_blocks);
    ValidateBlockIds(group, "num_host_lcm_blocks", num_host_lcm_blocks);
  }
}

std::int32_t SchedulerConfig::replay_window_tokens() const {
  std::int32_t window_tokens = 0;
  for (const CacheGroupConfig& group : cache_groups) {
    window_tokens = std::max(window_tokens, group.replayable ? group.sliding_window_tokens.value_or(0) : 0);
  }
  return window_tokens;
}

std::vector<CacheGroupSpec> MakeSpecsFromConfig(const SchedulerConfig& config) {
  std::vector<CacheGroupSpec> specs;
  for (const CacheGroupConfig& group : config.cache_groups) {
    specs.push_back({.group_id = group.group_id,
                     .block_granularity = group.block_granularity,
                     .cache_blocks_per_lcm_block = group.cache_blocks_per_lcm_block,
                     .kind = KindOf(group),
                     .window_tokens = group.sliding_window_tokens.value_or(0),
                     .shard_count = group.shard_count,
                     .is_replayable = group.replayable});
  }
  return specs;
}

}  // namespace pdmesh
