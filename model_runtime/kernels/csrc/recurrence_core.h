// The inner part of recurrent layers: a matrix of state that decays and takes up one outer product per token,
// and the short convolution before it.
//
// Plain data and function pointers, compiled once per instruction set. Must not know threads, blocks or
// Python.
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

// Most columns of a state that one task keeps in registers while it walks down the rows.
inline constexpr int kColumnsPerTask = 64;

// Some tokens of one head, for some columns of its state S[key_dim, num_columns]. Per token, row i and column
// j:
//   S_ij *= decay_i;   w_j = strength * (value_j - sum_i key_i S_ij)   or   strength * value_j;
//   S_ij += key_i w_j; output_j = sum_i query_i S_ij + skip * value_j.
// Columns are independent of each other, and sums go down the rows in order, so the result depends neither on
// how columns are shared out nor on how tokens are. Strides in floats, the last axis is contiguous.
struct RecurrenceTask {
  const float* query = nullptr;  // [num_tokens, key_dim]
  std::int64_t query_stride = 0;
  const float* key = nullptr;  // [num_tokens, key_dim]
  std::int64_t key_stride = 0;
  const float* value = nullptr;  // [num_tokens, num_columns]
  std::int64_t value_stride = 0;
  const float* decay = nullptr;  // [num_tokens, key_dim] or [num_tokens, 1]
  std::int64_t decay_stride = 0;
  bool decays_by_row = false;
  const float* strength = nullptr;  // [num_tokens]
  std::int64_t strength_stride = 0;
  bool subtracts_recalled = false;  // the delta rule: what the key recalls already is not written again
  float skip = 0.0F;
  float* output = nullptr;  // [num_tokens, num_columns]
  std::int64_t output_stride = 0;
  float* state = nullptr;  // [key_dim, kColumnsPerTask], contiguous; columns past num_columns are scratch
  int num_tokens = 0;
  int key_dim = 0;
  int num_columns = 0;  // in [1, kColumnsPerTask]
};

using RecurrenceCore = void (*)(const RecurrenceTask& task);

// One row's tokens for some channels: output[t, c] = silu(bias[c] + sum_k weight[k, c] * x[t - width + 1 + k,
// c]), where x are the inputs, before the first of them the history.
struct ConvTask {
  const float* input = nullptr;  // [num_tokens, num_channels]
  std::int64_t input_stride = 0;
  const float* history = nullptr;  // [width - 1, num_channels], oldest first
  std::int64_t history_stride = 0;
  const float* weight = nullptr;  // [width, num_channels]
  std::int64_t weight_stride = 0;
  const float* bias = nullptr;  // [num_channels], or null for none
  float* output = nullptr;      // [num_tokens, num_channels]
  std::int64_t output_stride = 0;
  int num_tokens = 0;
  int width = 0;
  int num_channels = 0;
};

using ConvCore = void (*)(const ConvTask& task);

namespace baseline {
void recur(const RecurrenceTask& task);
void convolve(const ConvTask& task);
}  // namespace baseline
namespace avx2 {
void recur(const RecurrenceTask& task);
void convolve(const ConvTask& task);
}  // namespace avx2
namespace avx512 {
void recur(const RecurrenceTask& task);
void convolve(const ConvTask& task);
}  // namespace avx512

}  // namespace pdmesh::kernels
