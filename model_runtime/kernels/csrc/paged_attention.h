// Causal, optionally windowed, grouped-query attention over a paged key/value cache: splits a batch into
// tiles and shares them out.
//
// Reads the cache through the page table only. Must not know Python, the arena or the scheduler.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "attention_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// Views of one call; nothing is owned. Strides are in floats, the head dimension is contiguous everywhere.
struct AttentionCall {
  const float* query = nullptr;  // [num_tokens, num_heads, head_dim], rows of the batch concatenated
  std::int64_t query_token_stride = 0;
  float* output = nullptr;  // [num_tokens, num_heads, head_dim]
  std::int64_t output_token_stride = 0;
  float* log_sum_exp = nullptr;  // [num_tokens, num_heads], null: not wanted, and then no page may be absent
  std::int64_t log_sum_exp_token_stride = 0;
  const float* key = nullptr;    // [num_pages, page_tokens, num_kv_heads, head_dim]
  const float* value = nullptr;  // as key, with strides of its own
  std::int64_t key_page_stride = 0;
  std::int64_t key_token_stride = 0;
  std::int64_t value_page_stride = 0;
  std::int64_t value_token_stride = 0;
  const std::int32_t* page_table = nullptr;  // [num_rows, max_pages]
  const std::int32_t* begins = nullptr;      // [num_rows] position of each row's first token
  const std::int32_t* lengths = nullptr;     // [num_rows] tokens of each row
  std::int64_t num_tokens = 0;
  std::int64_t num_rows = 0;
  std::int64_t max_pages = 0;
  std::int64_t num_pages = 0;
  std::int64_t page_tokens = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float scale = 1.0F;
  int window_tokens = std::numeric_limits<int>::max();  // tokens a query sees, its own included

  // Throws std::invalid_argument naming the value; nothing has been read or written then.
  void validate() const;
};

class PagedAttention {
 public:
  // REQUIRES: num_threads is that of every pool passed to attend.
  PagedAttention(AttentionCore core, int num_threads);

  // The cache rows of the batch's own tokens are written before this is called. The result of a token depends
  // on its row alone: not on the batch around it, on how the prompt was cut into chunks, nor on the number of
  // threads. One call at a time.
  void attend(const AttentionCall& call, WorkerPool& pool);

 private:
  static constexpr int kAllParts = -1;

  // A tile, or one part of a tile whose parts are shared out.
  struct Item {
    std::int64_t row;
    int first_token;  // within the row
    int kv_head;
    std::int64_t row_offset;  // of the row's first token among the batch's tokens
    int part = kAllParts;
    std::size_t split = 0;  // of splits_, if it is a part
  };

  // A tile whose parts are shared out: whoever finishes the last part joins them.
  struct Split {
    int first_part;
    int num_parts;
    std::int64_t first_float;  // in part_results_
    int num_unfinished;        // atomic while a call runs
  };

  void plan_items(const AttentionCall& call);
  void plan_parts(const AttentionCall& call, Item tile, std::int64_t floats_per_part);
  void attend_item(const AttentionCall& call, const Item& item, float* scratch);

  AttentionCore core_;
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::vector<float> part_results_;
  std::vector<std::vector<float>> scratch_;  // per thread
};

}  // namespace pdmesh::kernels
