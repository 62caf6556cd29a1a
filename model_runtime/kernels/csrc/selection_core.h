// The inner part of choosing rows: what a token's index heads find each key worth; and of choosing a token.
//
// Plain data and function pointers, compiled once per instruction set. Must not know threads, pages or
// Python.
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

// scores[j] = sum over heads, in order, of weights[h] * max(0, queries[h] . keys[j]).
struct SelectionTask {
  const float* queries = nullptr;  // [num_heads, head_dim]
  std::int64_t query_head_stride = 0;
  const float* weights = nullptr;      // [num_heads]
  const float* const* keys = nullptr;  // [num_keys] rows of head_dim floats
  float* scores = nullptr;             // [num_keys]
  int num_heads = 0;
  int head_dim = 0;
  int num_keys = 0;
};

using SelectionCore = void (*)(const SelectionTask& task);

// The index of the largest of `width` numbers, the first among equals; of the first NaN, if there is one.
using LargestCore = int (*)(const float* numbers, int width);

namespace baseline {
void score_rows(const SelectionTask& task);
int find_largest(const float* numbers, int width);
}  // namespace baseline
namespace avx2 {
void score_rows(const SelectionTask& task);
int find_largest(const float* numbers, int width);
}  // namespace avx2
namespace avx512 {
void score_rows(const SelectionTask& task);
int find_largest(const float* numbers, int width);
}  // namespace avx512

}  // namespace pdmesh::kernels
