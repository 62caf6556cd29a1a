// Which request gives its blocks back when memory runs short.
//
// A pure order over small views of the candidates; who is a candidate at all, and when one is asked for, is
// the scheduler's business.
#pragma once

#include <cstdint>

namespace pdmesh {

struct VictimView {
  bool is_incomplete_prefill;              // has generated nothing since its admission
  std::int64_t num_tokens;                 // prompt and completion
  std::int64_t num_releasable_lcm_blocks;  // parents that would be free, or evictable, without it
  std::uint64_t submission;                // younger requests have larger numbers
};

// Whether `a` gives way before `b`. Incomplete prefills first, the longest of them: they hold most and have
// nothing to show. Of the others the one whose end frees most parents; of those the shortest, which is
// computed again soonest; then the youngest.
bool GivesWayBefore(const VictimView& a, const VictimView& b);

}  // namespace pdmesh
