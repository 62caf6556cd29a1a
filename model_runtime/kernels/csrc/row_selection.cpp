#include "row_selection.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <vector>

namespace pdmesh::kernels {
namespace {

// Below this many (head, key) pairs waking a sleeping thread costs more than it saves.
constexpr std::int64_t kMinPairsToShare = 4096;

struct Token {
  std::int64_t row;
  std::int64_t index;  // among the tokens of the batch
  int position;
};

struct Scratch {
  std::vector<const float*> keys;
  std::vector<float> scores;
  std::vector<std::int32_t> positions;
};

std::vector<Token> tokens_of(const AttentionCall& call) {
  std::vector<Token> tokens;
  for (std::int64_t row = 0; row < call.num_rows; ++row) {
    for (int step = 0; step < call.lengths[row]; ++step) {
      tokens.push_back({row, static_cast<std::int64_t>(tokens.size()), call.begins[row] + step});
    }
  }
  return tokens;
}

void score_token(const SelectionCall& call, SelectionCore core, const Token& token, Scratch& scratch) {
  const AttentionCall& attention = call.attention;
  const auto num_keys = static_cast<std::size_t>(token.position) + 1;
  scratch.keys.resize(num_keys);
  scratch.scores.resize(num_keys);
  const std::int32_t* pages = attention.page_table + token.row * attention.max_pages;
  for (std::size_t position = 0; position < num_keys; ++position) {
    const auto at = static_cast<std::int64_t>(position);
    scratch.keys[position] = attention.key + pages[at / attention.page_tokens] * attention.key_page_stride +
                             at % attention.page_tokens * attention.key_token_stride;
  }
  SelectionTask task;
  task.queries = attention.query + token.index * attention.query_token_stride;
  task.query_head_stride = call.query_head_stride;
  task.weights = call.weights + token.index * call.weight_token_stride;
  task.keys = scratch.keys.data();
  task.scores = scratch.scores.data();
  task.num_heads = attention.num_heads;
  task.head_dim = attention.head_dim;
  task.num_keys = static_cast<int>(num_keys);
  core(task);
  // What is no number is worth nothing; it would break the order.
  for (float& score : scratch.scores) {
    if (!(score == score)) score = -std::numeric_limits<float>::infinity();
  }
}

void select_token(const SelectionCall& call, SelectionCore core, const Token& token, Scratch& scratch) {
  std::int32_t* selected = call.selected + token.index * call.num_selected;
  const int num_keys = token.position + 1;
  const int count = std::min(num_keys, call.num_selected);
  std::fill(selected + count, selected + call.num_selected, -1);
  if (count == num_keys) {
    std::iota(selected, selected + count, 0);
    return;
  }
  score_token(call, core, token, scratch);
  scratch.positions.resize(static_cast<std::size_t>(num_keys));
  std::iota(scratch.positions.begin(), scratch.positions.end(), 0);
  const std::vector<float>& scores = scratch.scores;
  std::nth_element(scratch.positions.begin(), scratch.positions.begin() + count, scratch.positions.end(),
                   [&](std::int32_t a, std::int32_t b) {
                     const float left = scores[static_cast<std::size_t>(a)];
                     const float right = scores[static_cast<std::size_t>(b)];
                     return left != right ? left > right : a < b;
                   });
  std::copy_n(scratch.positions.begin(), count, selected);
  std::sort(selected, selected + count);
}

}  // namespace

void select_rows(const SelectionCall& call, SelectionCore core, WorkerPool& pool) {
  call.attention.validate();
  const std::vector<Token> tokens = tokens_of(call.attention);
  std::int64_t num_pairs = 0;
  for (const Token& token : tokens) num_pairs += (token.position + 1) * call.attention.num_heads;
  std::atomic<std::size_t> next{0};
  const auto drain = [&](int) {
    Scratch scratch;
    for (std::size_t index = next++; index < tokens.size(); index = next++) {
      select_token(call, core, tokens[index], scratch);
    }
  };
  if (num_pairs < kMinPairsToShare) {
    drain(0);
  } else {
    pool.run_on_all(drain);
  }
}

}  // namespace pdmesh::kernels
