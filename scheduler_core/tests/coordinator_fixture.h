// What tests of the coordinator hand to it: chains of content, grains to publish, demands of all groups.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/coordinator/cache_coordinator.h"
#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {

// Digests of a prompt that repeats one token, of one grain each.
inline std::vector<Digest> ChainOf(std::int32_t content, std::int32_t num_grains) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(num_grains), content);
  GrainChain chain(1, {});
  chain.ExtendTo(tokens, num_grains);
  return {chain.digests().begin(), chain.digests().end()};
}

inline RequestProgress Grains(std::span<const Digest> digests, std::int32_t first, std::int32_t end) {
  return {.digests = digests, .first_grain = first, .end_grain = end};
}

// The same growth of every group, none of which promises blocks.
inline std::vector<GroupDemand> Everywhere(const CacheCoordinator& coordinator, const DenseGrowth& growth) {
  return std::vector<GroupDemand>(static_cast<std::size_t>(coordinator.num_groups()), {.extent = growth});
}

// P=8 with groups of g=4 and g=2.
inline std::unique_ptr<CacheCoordinator> TwoGroups(std::int32_t num_lcm_blocks) {
  return std::make_unique<CacheCoordinator>(
      8, num_lcm_blocks,
      std::vector<CacheGroupSpec>{
          {.group_id = "coarse", .block_granularity = 4, .cache_blocks_per_lcm_block = 1},
          {.group_id = "fine", .block_granularity = 2, .cache_blocks_per_lcm_block = 2}});
}

}  // namespace pdmesh
