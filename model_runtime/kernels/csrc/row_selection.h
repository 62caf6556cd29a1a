// Chooses for every token of a batch the rows of its history that are worth most, and shares the tokens out.
//
// Reads index keys through the page table only. Must not know Python, the arena or the scheduler.
#pragma once

#include <cstdint>

#include "paged_attention.h"
#include "selection_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

struct SelectionCall {
  // Queries [num_tokens, num_heads, head_dim], pages of one key per token, tables and lengths; no values, no
  // output.
  AttentionCall attention;
  std::int64_t query_head_stride = 0;
  const float* weights = nullptr;  // [num_tokens, num_heads]
  std::int64_t weight_token_stride = 0;
  std::int32_t* selected = nullptr;  // [num_tokens, num_selected]: positions, ascending, then -1
  int num_selected = 0;
};

// Of equals the earlier position is chosen. A token's choice depends on its own row alone. Throws
// std::invalid_argument before anything is written.
void select_rows(const SelectionCall& call, SelectionCore core, WorkerPool& pool);

}  // namespace pdmesh::kernels
