// Recurrent layers over a batch: shares rows, heads and columns out among a pool's threads.
//
// Reads and writes snapshots by block id only. Must not know Python, the arena or the scheduler.
#pragma once

#include <cstdint>
#include <vector>

#include "recurrence_core.h"
#include "state_rows.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// Heads of all tokens, rows of the batch concatenated: element d of head h of token t is at
// data[t * token_stride + h * head_stride + d].
template <class Element>
struct TokenHeads {
  Element* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// One recurrence for all rows. Value head h reads with query and key head h * num_key_heads / num_heads.
struct RecurrenceCall {
  StateRows rows;
  TokenHeads<const float> query;  // [num_tokens, num_key_heads, key_dim]
  TokenHeads<const float> key;    // [num_tokens, num_key_heads, key_dim]
  TokenHeads<const float> value;  // [num_tokens, num_heads, value_dim]
  TokenHeads<float> output;       // as value
  // Of token and head: the raw step s, its bias, and the rate; decay = exp(-rate * softplus(s + bias)).
  TokenHeads<const float> step;      // [num_tokens, num_heads, 1 or key_dim]
  const float* step_bias = nullptr;  // [num_heads, 1 or key_dim]
  const float* rate = nullptr;       // [num_heads]
  std::int64_t steps_per_head = 1;   // 1, or key_dim: every row of a state decays by itself
  // The delta rule writes with the sigmoid of these and brings queries and keys to unit length; without them
  // the step itself is the strength.
  const float* strength_logits = nullptr;  // [num_tokens, num_heads], token stride below
  std::int64_t strength_token_stride = 0;
  const float* skip = nullptr;  // [num_heads], or null for none
  float max_step = 0.0F;        // steps are clamped to [min_step, max_step] where the step is the strength
  float min_step = 0.0F;
  float* states = nullptr;  // [num_blocks, num_heads, key_dim, value_dim]
  std::int64_t state_block_stride = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_key_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;

  bool is_delta_rule() const { return strength_logits != nullptr; }
};

struct ConvCall {
  StateRows rows;
  const float* input = nullptr;  // [num_tokens, num_channels]
  std::int64_t input_stride = 0;
  const float* weight = nullptr;  // [width, num_channels]
  const float* bias = nullptr;    // [num_channels], or null
  float* output = nullptr;        // [num_tokens, num_channels]; not the input
  std::int64_t output_stride = 0;
  float* states = nullptr;  // [num_blocks, width - 1, num_channels]
  std::int64_t state_block_stride = 0;
  std::int64_t num_channels = 0;
  int width = 0;
};

class Recurrence {
 public:
  Recurrence(RecurrenceCore recurrence, ConvCore conv) : recurrence_(recurrence), conv_(conv) {}

  // The result of a token depends on its row alone: not on the batch around it, on how the row was cut into
  // chunks, nor on the number of threads. One call at a time. Throws std::invalid_argument before anything is
  // written.
  void recur(const RecurrenceCall& call, WorkerPool& pool);
  void convolve(const ConvCall& call, WorkerPool& pool);

 private:
  void prepare(const RecurrenceCall& call, WorkerPool& pool);
  void prepare_token(const RecurrenceCall& call, std::int64_t token);
  void recur_columns(const RecurrenceCall& call, std::int64_t row, std::int64_t first_token,
                     std::int64_t head, std::int64_t column, float* state) const;

  RecurrenceCore recurrence_;
  ConvCore conv_;
  std::vector<float> decays_;     // [num_tokens, num_heads, steps_per_head]
  std::vector<float> strengths_;  // [num_tokens, num_heads]
  std::vector<float> queries_;    // [num_tokens, num_key_heads, key_dim], of the delta rule
  std::vector<float> keys_;       // the same
};

}  // namespace pdmesh::kernels
