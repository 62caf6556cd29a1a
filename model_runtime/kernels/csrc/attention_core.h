// The inner part of paged attention: one tile of queries that share one key/value head.
//
// Plain data and one function pointer, so that the same source can be compiled once per instruction set.
// Must not know threads, Python or how rows are split into tiles.
#pragma once

#include <cstdint>
#include <limits>

namespace pdmesh::kernels {

// Keys are visited in groups of this many absolute positions, aligned at position 0. The grouping fixes the
// order of every reduction, so a query's result depends on its own position and history alone.
inline constexpr int kKeysPerStep = 64;

// The softmax of so many positions, aligned at position 0, is computed on its own; the parts of a history are
// then joined in order. A long history can be shared out in parts, and has the same bits if it is not.
inline constexpr int kKeysPerPart = 512;

// Entry of a page table whose rows are elsewhere: a query attends to the others. Only where the log-sum-exp
// is wanted, without which nobody could tell what is missing.
inline constexpr std::int32_t kAbsentPage = -1;

// Most query tokens of one tile.
inline constexpr int kTokensPerTile = 16;

// The rows of one key/value head, in units of float: token `t` of page `p` begins at
// base + p * page_stride + t * token_stride.
struct HeadRows {
  const float* base = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
};

struct AttentionTile {
  const float* query = nullptr;  // first token of the tile, first head of the group
  std::int64_t query_token_stride = 0;
  float* output = nullptr;  // same heads, laid out as query with its own token stride
  std::int64_t output_token_stride = 0;
  float* log_sum_exp = nullptr;  // of the scores, same heads with a token stride of its own; null: not wanted
  std::int64_t log_sum_exp_token_stride = 0;
  int num_tokens = 0;       // in [1, kTokensPerTile]
  int num_group_heads = 0;  // query heads per key/value head, contiguous
  int head_dim = 0;
  int first_position = 0;  // absolute position of the first token; the others follow it
  int window_tokens = std::numeric_limits<int>::max();  // tokens a query sees, its own included; at least 1
  float scale = 1.0F;
  HeadRows key;
  HeadRows value;
  const std::int32_t* page_table = nullptr;  // this row's pages
  int page_tokens = 0;

  // The oldest position that a token of the tile sees.
  int first_visible() const {
    const int position = first_position - (window_tokens - 1);
    return position > 0 ? position : 0;
  }
};

// `scratch` holds scratch_floats(...) floats and is aligned to 64 bytes.
struct AttentionCore {
  void (*attend_tile)(const AttentionTile& tile, float* scratch);

  // One part of a tile: leaves part_floats(...) floats in `result`.
  void (*attend_part)(const AttentionTile& tile, int part, float* result, float* scratch);

  // Writes the tile's output from the results of the parts it sees, which follow one another. Consumes them.
  void (*join_parts)(const AttentionTile& tile, float* results, int num_parts);
};

std::int64_t scratch_floats(int num_group_heads, int head_dim);

// A multiple of a cache line.
std::int64_t part_floats(int num_tokens, int num_group_heads, int head_dim);

namespace baseline {
AttentionCore attention_core();
}
namespace avx2 {
AttentionCore attention_core();
}
namespace avx512 {
AttentionCore attention_core();
}

}  // namespace pdmesh::kernels
