#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>

namespace pdmesh::kernels {
namespace {

// Below this many (query head, key) pairs waking a sleeping thread costs more than it saves.
constexpr std::int64_t kMinPairsToShare = 4096;
constexpr std::int64_t kAlignmentFloats = 16;
// From so many rows for each thread on, the heads of a row stay on one thread: they lie side by side in
// memory.
constexpr std::int64_t kMinRowsPerThread = 4;

std::int64_t align(std::int64_t num_floats) {
  return (num_floats + kAlignmentFloats - 1) / kAlignmentFloats * kAlignmentFloats;
}

AttentionTile describe_tile(const AttentionCall& call, std::int64_t row, int first_token, int kv_head,
                            std::int64_t row_offset) {
  const int group = call.num_heads / call.num_kv_heads;
  const std::int64_t token = row_offset + first_token;
  const std::int64_t head_offset = static_cast<std::int64_t>(kv_head) * group * call.head_dim;
  const std::int64_t kv_offset = static_cast<std::int64_t>(kv_head) * call.head_dim;
  AttentionTile tile;
  tile.query = call.query + token * call.query_token_stride + head_offset;
  tile.query_token_stride = call.query_token_stride;
  tile.output = call.output + token * call.output_token_stride + head_offset;
  tile.output_token_stride = call.output_token_stride;
  if (call.log_sum_exp != nullptr) {
    tile.log_sum_exp =
        call.log_sum_exp + token * call.log_sum_exp_token_stride + static_cast<std::int64_t>(kv_head) * group;
    tile.log_sum_exp_token_stride = call.log_sum_exp_token_stride;
  }
  tile.num_tokens = std::min(kTokensPerTile, call.lengths[row] - first_token);
  tile.num_group_heads = group;
  tile.head_dim = call.head_dim;
  tile.first_position = call.begins[row] + first_token;
  tile.window_tokens = call.window_tokens;
  tile.scale = call.scale;
  tile.key = {call.key + kv_offset, call.key_page_stride, call.key_token_stride};
  tile.value = {call.value + kv_offset, call.value_page_stride, call.value_token_stride};
  tile.page_table = call.page_table + row * call.max_pages;
  tile.page_tokens = static_cast<int>(call.page_tokens);
  return tile;
}

// The first part of its history that a row's first token sees.
int first_part(const AttentionCall& call, std::int64_t row) {
  return std::max(0, call.begins[row] - (call.window_tokens - 1)) / kKeysPerPart;
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("paged attention: " + message);
}

}  // namespace

std::int64_t scratch_floats(int num_group_heads, int head_dim) {
  const std::int64_t num_queries = static_cast<std::int64_t>(kTokensPerTile) * num_group_heads;
  return (num_queries + 2 * kKeysPerStep) * align(head_dim) + 4 * kKeysPerStep +
         2 * part_floats(kTokensPerTile, num_group_heads, head_dim);
}

std::int64_t part_floats(int num_tokens, int num_group_heads, int head_dim) {
  return align(static_cast<std::int64_t>(num_tokens) * num_group_heads * (align(head_dim) + 2));
}

void AttentionCall::validate() const {
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    refuse("num_heads " + std::to_string(num_heads) + " is no multiple of num_kv_heads " +
           std::to_string(num_kv_heads));
  }
  if (window_tokens < 1) {
    refuse("a query must see at least itself, window_tokens is " + std::to_string(window_tokens));
  }
  const std::int32_t first_page = log_sum_exp == nullptr ? 0 : kAbsentPage;
  std::int64_t num_row_tokens = 0;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (begins[row] < 0 || lengths[row] < 1) {
      refuse("row " + std::to_string(row) + " has begin " + std::to_string(begins[row]) + " and length " +
             std::to_string(lengths[row]));
    }
    num_row_tokens += lengths[row];
    const std::int64_t end = static_cast<std::int64_t>(begins[row]) + lengths[row];
    const std::int64_t pages = (end + page_tokens - 1) / page_tokens;
    if (pages > max_pages) {
      refuse("row " + std::to_string(row) + " needs " + std::to_string(pages) + " pages, its table has " +
             std::to_string(max_pages));
    }
    for (std::int64_t index = 0; index < pages; ++index) {
      const std::int32_t page = page_table[row * max_pages + index];
      if (page < first_page || page >= num_pages) {
        refuse("row " + std::to_string(row) + " names page " + std::to_string(page) + ", the cache has " +
               std::to_string(num_pages));
      }
    }
  }
  if (num_row_tokens != num_tokens) {
    refuse("lengths sum to " + std::to_string(num_row_tokens) + ", query has " + std::to_string(num_tokens) +
           " tokens");
  }
}

PagedAttention::PagedAttention(AttentionCore core, int num_threads)
    : core_(core), scratch_(static_cast<std::size_t>(num_threads)) {}

void PagedAttention::plan_items(const AttentionCall& call) {
  items_.clear();
  splits_.clear();
  const std::int64_t floats_per_part = part_floats(1, call.num_heads / call.num_kv_heads, call.head_dim);
  std::int64_t row_offset = 0;
  for (std::int64_t row = 0; row < call.num_rows; ++row) {
    // A decoding row has one token for each head: too little to share out but by its history.
    const bool is_split = call.lengths[row] == 1 && first_part(call, row) < call.begins[row] / kKeysPerPart;
    // Late tiles see the most keys; handing them out first leaves small ones to even out the end.
    const int num_tiles = (call.lengths[row] + kTokensPerTile - 1) / kTokensPerTile;
    for (int tile = num_tiles - 1; tile >= 0; --tile) {
      for (int kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
        const Item item{row, tile * kTokensPerTile, kv_head, row_offset};
        if (is_split) {
          plan_parts(call, item, floats_per_part);
        } else {
          items_.push_back(item);
        }
      }
    }
    row_offset += call.lengths[row];
  }
  const auto num_floats = static_cast<std::size_t>(
      splits_.empty() ? 0 : splits_.back().first_float + splits_.back().num_parts * floats_per_part);
  if (part_results_.size() < num_floats) part_results_.resize(num_floats);
}

void PagedAttention::plan_parts(const AttentionCall& call, Item tile, std::int64_t floats_per_part) {
  const int first = first_part(call, tile.row);
  const int num_parts = call.begins[tile.row] / kKeysPerPart + 1 - first;
  const std::int64_t first_float =
      splits_.empty() ? 0 : splits_.back().first_float + splits_.back().num_parts * floats_per_part;
  tile.split = splits_.size();
  splits_.push_back({first, num_parts, first_float, num_parts});
  for (tile.part = first; tile.part < first + num_parts; ++tile.part) items_.push_back(tile);
}

void PagedAttention::attend_item(const AttentionCall& call, const Item& item, float* scratch) {
  const AttentionTile tile = describe_tile(call, item.row, item.first_token, item.kv_head, item.row_offset);
  if (item.part == kAllParts) return core_.attend_tile(tile, scratch);
  Split& split = splits_[item.split];
  float* results = part_results_.data() + split.first_float;
  const std::int64_t floats_per_part = part_floats(tile.num_tokens, tile.num_group_heads, tile.head_dim);
  core_.attend_part(tile, item.part, results + (item.part - split.first_part) * floats_per_part, scratch);
  if (--std::atomic_ref<int>(split.num_unfinished) == 0) core_.join_parts(tile, results, split.num_parts);
}

void PagedAttention::attend(const AttentionCall& call, WorkerPool& pool) {
  call.validate();
  plan_items(call);
  std::int64_t num_pairs = 0;
  for (std::int64_t row = 0; row < call.num_rows; ++row) {
    const std::int64_t num_keys =
        std::min<std::int64_t>(call.begins[row] + call.lengths[row], call.window_tokens);
    num_pairs += call.lengths[row] * num_keys;
  }
  const auto num_floats = static_cast<std::size_t>(
      scratch_floats(call.num_heads / call.num_kv_heads, call.head_dim) + kAlignmentFloats);
  const bool has_rows_enough = call.num_rows >= kMinRowsPerThread * pool.num_threads();
  const auto items_per_turn = static_cast<std::size_t>(has_rows_enough ? call.num_kv_heads : 1);
  std::atomic<std::size_t> next_turn{0};
  const auto drain = [&](int thread_index) {
    std::vector<float>& scratch = scratch_[static_cast<std::size_t>(thread_index)];
    if (scratch.size() < num_floats) scratch.resize(num_floats);
    void* aligned = scratch.data();
    std::size_t space = scratch.size() * sizeof(float);
    std::align(kAlignmentFloats * sizeof(float), sizeof(float), aligned, space);
    for (std::size_t first = items_per_turn * next_turn++; first < items_.size();
         first = items_per_turn * next_turn++) {
      for (std::size_t index = first; index < std::min(first + items_per_turn, items_.size()); ++index) {
        attend_item(call, items_[index], static_cast<float*>(aligned));
      }
    }
  };
  if (num_pairs * call.num_heads < kMinPairsToShare) {
    drain(0);
  } else {
    pool.run_on_all(drain);
  }
}

}  // namespace pdmesh::kernels
