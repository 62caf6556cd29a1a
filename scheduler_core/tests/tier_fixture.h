// A coordinator with a host tier and storage, and ways to bring content into either.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "coordinator_fixture.h"

namespace pdmesh {

inline CacheGroupSpec FullGroup(std::int32_t block_granularity, std::int32_t packing = 1,
                                std::int32_t shard_count = 1) {
  return {.group_id = "full",
          .block_granularity = block_granularity,
          .cache_blocks_per_lcm_block = packing,
          .shard_count = shard_count};
}
inline CacheGroupSpec SlidingGroup(std::int32_t window_tokens, std::int32_t block_granularity) {
  return {.group_id = "sliding",
          .block_granularity = block_granularity,
          .cache_blocks_per_lcm_block = 1,
          .kind = AttentionKind::kSlidingWindow,
          .window_tokens = window_tokens};
}
inline CacheGroupSpec StateGroup(std::int32_t block_granularity) {
  return {.group_id = "state",
          .block_granularity = block_granularity,
          .cache_blocks_per_lcm_block = 1,
          .kind = AttentionKind::kState};
}

// A request that is being admitted behind whatever there is, or computed from the beginning.
struct TierRequest {
  std::vector<BlockTable> tables;
  std::optional<Admission> admission;
  PrefixProbe probe;
};

class TierFixture {
 public:
  TierFixture(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks, std::vector<CacheGroupSpec> specs,
              TierConfig tiers, std::int32_t num_grains = 8)
      : prefix_granularity_(prefix_granularity),
        num_grains_(num_grains),
        digests(ChainOf(1, num_grains)),
        coordinator(prefix_granularity, num_lcm_blocks, std::move(specs), EvictionPolicy::kLru, tiers) {}

  // What a prompt of `num_tokens` asks for behind a hit.
  std::vector<GroupDemand> DemandsBehind(std::int64_t hit_tokens, std::int64_t num_tokens) const {
    std::vector<GroupDemand> demands;
    for (std::int32_t group = 0; group < coordinator.num_groups(); ++group) {
      const CacheGroup& asked = coordinator.group(group);
      if (asked.is_closed()) {
        demands.push_back(
            {.extent = DenseGrowth{.extent_tokens = num_tokens - hit_tokens, .reserve_tokens = 0}});
      } else {
        demands.push_back({.extent = SparseSuffix{.first_slot = hit_tokens / asked.spec.block_granularity,
                                                  .extent_tokens = num_tokens,
                                                  .reserve_tokens = 0},
                           .num_promised_blocks = asked.geometry.BlocksFor(num_tokens)});
      }
    }
    return demands;
  }

  // Admits a prompt of the fixture's chain.
  TierRequest Admit(std::int64_t num_tokens) {
    TierRequest request{.tables = coordinator.MakeTables(), .admission = {}, .probe = {}};
    request.probe =
        coordinator.ProbePrefix(digests, static_cast<std::int32_t>((num_tokens - 1) / prefix_granularity_));
    request.admission =
        coordinator.AdmitFirst(request.tables, request.probe,
                               [&](const PrefixProbe& probe) -> std::optional<std::vector<GroupDemand>> {
                                 ++num_attempts;
                                 return DemandsBehind(probe.hit_tokens, num_tokens);
                               });
    return request;
  }

  // Computes the first `end_grain` grains and publishes them as a prompt that ends there.
  void ComputeOnce(std::int32_t end_grain, StoreScope scope = StoreScope::kNothing) {
    TierRequest request{.tables = coordinator.MakeTables(), .admission = {}, .probe = {}};
    PrefixProbe none = coordinator.ProbePrefix({}, 0);
    const std::int64_t num_tokens = std::int64_t{end_grain} * prefix_granularity_;
    request.admission = coordinator.AdmitFirst(request.tables, none, DemandsBehind(0, num_tokens));
    ASSERT_TRUE(request.admission);
    coordinator.Publish(request.tables, request.admission->epoch,
                        {.digests = digests,
                         .first_grain = 0,
                         .end_grain = end_grain,
                         .kind = BoundaryKind::kEndpoint,
                         .state_checkpoint_tokens = num_tokens,
                         .store_scope = scope});
  }

  // The same, copied to the host and gone from the device.
  void ComputeToHost(std::int32_t end_grain) {
    ComputeOnce(end_grain, StoreScope::kEverything);
    CompleteStores(coordinator.StartTransfers());
    coordinator.Clear();
  }

  void CompleteStores(const PlannedTransfers& planned) {
    for (const PlannedStore& store : planned.stores) {
      coordinator.CompleteStore(store.operation_id, {});
    }
  }

  CacheKey KeyOf(std::int32_t group, std::int64_t slot) const {
    return coordinator.group(group).keys.KeyOf(digests, slot);
  }
  // Storage has the blocks of one group in these slots.
  void PutInStorage(std::int32_t group, const std::vector<std::int64_t>& slots) {
    std::vector<CacheKey> keys;
    for (const std::int64_t slot : slots) {
      keys.push_back(KeyOf(group, slot));
    }
    coordinator.RegisterStorageKeys(keys);
  }

 private:
  std::int32_t prefix_granularity_;
  std::int32_t num_grains_;

 public:
  std::vector<Digest> digests;
  CacheCoordinator coordinator;
  int num_attempts = 0;
};

}  // namespace pdmesh
