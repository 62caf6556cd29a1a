// Configuration of a scheduler. There is no default configuration; Validate is the single gate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache/coordinator/cache_group.h"
#include "cache/prefix/eviction_policy.h"
#include "role.h"

namespace pdmesh {

enum class Family : std::uint8_t { kHistory, kState };
enum class Retention : std::uint8_t { kFullHistory, kSlidingWindow };

struct CacheGroupConfig {
  std::string group_id;
  Family family;
  Retention retention;
  std::int32_t block_granularity;                     // tokens one block-table slot covers
  std::int32_t cache_blocks_per_lcm_block = 1;        // of all shards together
  std::optional<std::int32_t> sliding_window_tokens;  // exactly with sliding retention
  bool replayable = false;       // sliding: not cached; a hit feeds the window before it again
  std::int32_t shard_count = 1;  // owners that hold the blocks cyclically; divides the blocks of a parent
};

struct SchedulerConfig {
  Role role;
  std::int32_t prefix_granularity;  // tokens per hashed and matched grain
  std::int32_t num_lcm_blocks;      // usable parents, the null parent not counted
  std::int32_t max_batch_size;      // rows of a plan
  std::int32_t token_budget;        // input tokens of a plan
  std::vector<CacheGroupConfig> cache_groups;
  bool enable_prefix_cache = true;
  std::int32_t max_ready_ungranted = 64;  // prefill role: started prompts that no peer has granted yet
  std::int32_t verify_width = 1;          // tokens a decode row feeds
  std::int32_t overlap_depth = 0;         // results of a request that may be out when its next row is planned
  EvictionPolicy eviction_policy = EvictionPolicy::kLru;  // needs the prefix cache unless it is LRU
  bool enable_prefix_events = false;                      // announce what is cached; needs the prefix cache
  std::int32_t num_host_lcm_blocks = 0;                   // usable parents in host memory; 0 for no host tier
  bool enable_storage = false;                            // storage behind the host tier, which it needs

  // Throws ConfigError naming the field, its value and the limit or the other value, and the group if there
  // is one.
  void Validate() const;
  // The same for everything but the counts of blocks: what must hold before a pool can be sized. Validate
  // includes it.
  void ValidateSizing() const;

  // Tokens before a hit that are fed again: the largest window of a replayable group, 0 without one.
  std::int32_t replay_window_tokens() const;
};

// Translates, checks nothing.
std::vector<CacheGroupSpec> MakeSpecsFromConfig(const SchedulerConfig& config);

}  // namespace pdmesh
