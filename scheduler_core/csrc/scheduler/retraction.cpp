#include "scheduler/retraction.h"

#include <tuple>

namespace pdmesh {
namespace {

// Smallest first.
auto RankOf(const VictimView& victim) {
  return victim.is_incomplete_prefill
             ? std::tuple(0, -victim.num_tokens, std::int64_t{0}, ~victim.submission)
             : std::tuple(1, -victim.num_releasable_lcm_blocks, victim.num_tokens, ~victim.submission);
}

}  // namespace

bool GivesWayBefore(const VictimView& a, const VictimView& b) {
  return RankOf(a) < RankOf(b);
}

}  // namespace pdmesh
