#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "scheduler/config.h"

namespace pdmesh::bindings {

using namespace nb::literals;

namespace {

void BindEnums(nb::module_& module) {
  nb::enum_<Role>(module, "Role", "What a scheduler does in the mesh.")
      .value("PREFILL", Role::kPrefill, "computes prompts and hands their blocks over")
      .value("DECODE", Role::kDecode, "has prompts filled by a peer and generates")
      .value("FUSED", Role::kFused, "does both in one place");
  nb::enum_<Family>(module, "Family", "What the blocks of a group hold.")
      .value("HISTORY", Family::kHistory, "rows of tokens")
      .value("STATE", Family::kState, "one state snapshot each");
  nb::enum_<Retention>(module, "Retention", "Which blocks of a group a request keeps.")
      .value("FULL_HISTORY", Retention::kFullHistory)
      .value("SLIDING_WINDOW", Retention::kSlidingWindow);
  nb::enum_<EvictionPolicy>(module, "EvictionPolicy", "Which cached blocks go first.")
      .value("LRU", EvictionPolicy::kLru, "least recently used")
      .value("AGED_FREQUENCY", EvictionPolicy::kAgedFrequency,
             "least frequently used, with dynamic aging and a memory of evicted prefixes");
}

void BindGroup(nb::module_& module) {
  nb::class_<CacheGroupConfig>(module, "CacheGroupConfig", "One attention structure of the model.")
      .def(
          "__init__",
          [](CacheGroupConfig* self, std::string group_id, Family family, Retention retention,
             std::int32_t block_granularity, std::int32_t cache_blocks_per_lcm_block,
             std::optional<std::int32_t> sliding_window_tokens, bool replayable, std::int32_t shard_count) {
            new (self) CacheGroupConfig{.group_id = std::move(group_id),
                                        .family = family,
                                        .retention = retention,
                                        .block_granularity = block_granularity,
                                        .cache_blocks_per_lcm_block = cache_blocks_per_lcm_block,
                                        .sliding_window_tokens = sliding_window_tokens,
                                        .replayable = replayable,
                                        .shard_count = shard_count};
          },
          nb::kw_only(), "group_id"_a, "family"_a, "retention"_a, "block_granularity"_a,
          "cache_blocks_per_lcm_block"_a = 1, "sliding_window_tokens"_a = nb::none(), "replayable"_a = false,
          "shard_count"_a = 1)
      .def_ro("group_id", &CacheGroupConfig::group_id)
      .def_ro("family", &CacheGroupConfig::family)
      .def_ro("retention", &CacheGroupConfig::retention)
      .def_ro("block_granularity", &CacheGroupConfig::block_granularity)
      .def_ro("cache_blocks_per_lcm_block", &CacheGroupConfig::cache_blocks_per_lcm_block)
      .def_ro("sliding_window_tokens", &CacheGroupConfig::sliding_window_tokens)
      .def_ro("replayable", &CacheGroupConfig::replayable)
      .def_ro("shard_count", &CacheGroupConfig::shard_count);
}

void BindSchedulerConfig(nb::module_& module) {
  nb::class_<SchedulerConfig>(module, "SchedulerConfig", "Everything a scheduler is built from.")
      .def(
          "__init__",
          [](SchedulerConfig* self, Role role, std::int32_t prefix_granularity, std::int32_t num_lcm_blocks,
             std::int32_t max_batch_size, std::int32_t token_budget,
             std::vector<CacheGroupConfig> cache_groups, bool enable_prefix_cache,
             std::int32_t max_ready_ungranted, std::int32_t verify_width, std::int32_t overlap_depth,
             EvictionPolicy eviction_policy, bool enable_prefix_events, std::int32_t num_host_lcm_blocks,
             bool enable_storage) {
            new (self) SchedulerConfig{.role = role,
                                       .prefix_granularity = prefix_granularity,
                                       .num_lcm_blocks = num_lcm_blocks,
                                       .max_batch_size = max_batch_size,
                                       .token_budget = token_budget,
                                       .cache_groups = std::move(cache_groups),
                                       .enable_prefix_cache = enable_prefix_cache,
                                       .max_ready_ungranted = max_ready_ungranted,
                                       .verify_width = verify_width,
                                       .overlap_depth = overlap_depth,
                                       .eviction_policy = eviction_policy,
                                       .enable_prefix_events = enable_prefix_events,
                                       .num_host_lcm_blocks = num_host_lcm_blocks,
                                       .enable_storage = enable_storage};
          },
          nb::kw_only(), "role"_a, "prefix_granularity"_a, "num_lcm_blocks"_a, "max_batch_size"_a,
          "token_budget"_a, "cache_groups"_a, "enable_prefix_cache"_a = true, "max_ready_ungranted"_a = 64,
          "verify_width"_a = 1, "overlap_depth"_a = 0, "eviction_policy"_a = EvictionPolicy::kLru,
          "enable_prefix_events"_a = false, "num_host_lcm_blocks"_a = 0, "enable_storage"_a = false)
      .def("validate", &SchedulerConfig::Validate,
           "Raises ConfigError naming the field, its value and the limit, and the group if there is one.")
      .def("validate_sizing", &SchedulerConfig::ValidateSizing,
           "The part of validate() that needs no count of blocks.")
      .def_ro("role", &SchedulerConfig::role)
      .def_ro("prefix_granularity", &SchedulerConfig::prefix_granularity)
      .def_ro("num_lcm_blocks", &SchedulerConfig::num_lcm_blocks)
      .def_ro("max_batch_size", &SchedulerConfig::max_batch_size)
      .def_ro("token_budget", &SchedulerConfig::token_budget)
      .def_ro("cache_groups", &SchedulerConfig::cache_groups)
      .def_ro("enable_prefix_cache", &SchedulerConfig::enable_prefix_cache)
      .def_ro("max_ready_ungranted", &SchedulerConfig::max_ready_ungranted)
      .def_ro("verify_width", &SchedulerConfig::verify_width)
      .def_ro("overlap_depth", &SchedulerConfig::overlap_depth)
      .def_ro("eviction_policy", &SchedulerConfig::eviction_policy)
      .def_ro("enable_prefix_events", &SchedulerConfig::enable_prefix_events)
      .def_ro("num_host_lcm_blocks", &SchedulerConfig::num_host_lcm_blocks)
      .def_ro("enable_storage", &SchedulerConfig::enable_storage);
}

}  // namespace

void BindConfig(nb::module_& module) {
  BindEnums(module);
  BindGroup(module);
  BindSchedulerConfig(module);
}

}  // namespace pdmesh::bindings
