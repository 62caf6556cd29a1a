// GroupGeometry: the token arithmetic of one group. The only place where tokens become block counts.
#pragma once

#include <cstdint>
#include <variant>

#include "cache/core/acquire_plan.h"
#include "cache/core/block_table.h"
#include "support/int_math.h"

namespace pdmesh {

// What a group keeps and how its blocks are matched.
enum class AttentionKind : std::uint8_t {
  kFull,           // rows of every token
  kSlidingWindow,  // rows of the last tokens
  kState,          // snapshots; keeps and matches like a sliding window of two tokens
};

// What a group needs for the round ahead, relative to the current fill of its table.
struct DenseGrowth {
  std::int64_t extent_tokens;   // consumed now
  std::int64_t reserve_tokens;  // held beyond the extent, nobody else's
};

// The same in absolute positions, with holes below a slot.
struct SparseSuffix {
  std::int64_t first_slot;  // the first to materialise; slots that the table has already stay as they are
  std::int64_t extent_tokens;
  std::int64_t reserve_tokens;
};

using Extent = std::variant<DenseGrowth, SparseSuffix>;

class GroupGeometry {
 public:
  // `window_tokens` is what a sliding group keeps and is not looked at for other kinds.
  // REQUIRES: block_granularity > 0 and divides prefix_granularity; window_tokens > 0 if it counts.
  GroupGeometry(std::int32_t prefix_granularity, std::int32_t block_granularity,
                AttentionKind kind = AttentionKind::kFull, std::int32_t window_tokens = 0);

  AttentionKind kind() const { return kind_; }
  std::int32_t block_granularity() const { return block_granularity_; }
  std::int32_t slots_per_grain() const { return prefix_granularity_ / block_granularity_; }
  // Tokens whose blocks a query needs, its own included. REQUIRES: not a full group.
  std::int32_t window_tokens() const { return window_tokens_; }
  std::int64_t BlocksFor(std::int64_t num_tokens) const { return CeilDiv(num_tokens, block_granularity_); }
  // Blocks that `num_tokens` consecutive tokens touch at most, wherever they begin.
  std::int64_t BlocksAtWorst(std::int64_t num_tokens) const {
    return CeilDiv(num_tokens + block_granularity_ - 1, block_granularity_);
  }
  // The slot that holds the state after the first `num_tokens` tokens, or their last row.
  // REQUIRES: num_tokens > 0.
  std::int64_t SlotOfLast(std::int64_t num_tokens) const { return (num_tokens - 1) / block_granularity_; }

  // Blocks before a boundary that continuing from it reads: 0 for a full group, which reads all.
  std::int64_t num_lookback_blocks() const {
    return kind_ == AttentionKind::kFull ? 0 : CeilDiv(window_tokens_ - 1, block_granularity_);
  }
  // Leading slots that nobody needs any more once `num_computed_tokens` are computed.
  std::int64_t ExpiredBlocksAt(std::int64_t num_computed_tokens) const {
    const std::int64_t num_tokens = num_computed_tokens - window_tokens_ + 1;
    return kind_ == AttentionKind::kFull || num_tokens <= 0 ? 0 : num_tokens / block_granularity_;
  }

  // Growth uses the room behind the last token first.
  AcquirePlan PlanAcquire(std::int64_t tail_room_tokens, const DenseGrowth& demand) const;
  AcquirePlan PlanSuffix(std::int64_t num_slots, const SparseSuffix& demand) const;
  AcquirePlan PlanExtent(const BlockTable& table, const Extent& extent) const;

 private:
  std::int32_t prefix_granularity_;
  std::int32_t block_granularity_;
  AttentionKind kind_;
  std::int32_t window_tokens_;
};

}  // namespace pdmesh
