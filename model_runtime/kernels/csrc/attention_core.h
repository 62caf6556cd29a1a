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
};

// `scratch` holds scratch_floats(...) floats and is aligned to 64 bytes.
using AttentionCore = void (*)(const AttentionTile& tile, float* scratch);

std::int64_t scratch_floats(int num_group_heads, int head_dim);

namespace baseline {
void attend_tile(const AttentionTile& tile, float* scratch);
}
namespace avx2 {
void attend_tile(const AttentionTile& tile, float* scratch);
}
namespace avx512 {
void attend_tile(const AttentionTile& tile, float* scratch);
}

}  // namespace pdmesh::kernels
