// Which snapshots the rows of a batch continue from, and which they leave behind.
//
// A row's tokens are evaluated once, in order: from its input block (or from zeros), leaving a snapshot in
// the middle where one is wanted and one at the end. Must not know what a state is made of.
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

inline constexpr std::int32_t kNoBlock = -1;

// Views of one call; nothing is owned. All arrays are [num_rows].
struct StateRows {
  const std::int32_t* input_blocks = nullptr;        // kNoBlock: from zeros
  const std::int32_t* output_blocks = nullptr;       // may be the input
  const std::int32_t* checkpoint_blocks = nullptr;   // kNoBlock: none
  const std::int32_t* checkpoint_lengths = nullptr;  // tokens before the checkpoint, 0 for none
  const std::int32_t* lengths = nullptr;             // tokens of each row
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;  // of all rows
  std::int64_t num_blocks = 0;  // block 0, the null block, is nobody's state

  // Throws std::invalid_argument naming the value; nothing has been read or written then. Also for a block
  // that one row writes and another reads or writes: the result would depend on who is faster.
  void validate() const;
};

}  // namespace pdmesh::kernels
