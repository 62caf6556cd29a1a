#include "recurrence.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>

namespace pdmesh::kernels {
namespace {

// Below this many multiplications waking a sleeping thread costs more than it saves.
constexpr std::int64_t kMinWorkToShare = 1 << 17;
constexpr std::int64_t kChannelsPerItem = 256;
constexpr float kUnitLengthEps = 1e-6F;  // as in the published models

void share_out(WorkerPool& pool, std::int64_t num_items, std::int64_t work,
               const std::function<void(std::int64_t)>& run) {
  if (work < kMinWorkToShare) {
    for (std::int64_t item = 0; item < num_items; ++item) run(item);
    return;
  }
  std::atomic<std::int64_t> next{0};
  pool.run_on_all([&](int) {
    for (std::int64_t item = next++; item < num_items; item = next++) run(item);
  });
}

std::vector<std::int64_t> first_tokens(const StateRows& rows) {
  std::vector<std::int64_t> firsts;
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    firsts.push_back(next);
    next += rows.lengths[row];
  }
  return firsts;
}

float softplus(float x) {
  return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x)));
}

float sigmoid(float x) {
  const float decayed = std::exp(-std::abs(x));
  return (x < 0.0F ? decayed : 1.0F) / (1.0F + decayed);
}

void bring_to_length(const float* from, float* to, std::int64_t size, float length) {
  float squares = 0.0F;
  for (std::int64_t i = 0; i < size; ++i) squares += from[i] * from[i];
  const float factor = length / std::sqrt(squares + kUnitLengthEps);
  for (std::int64_t i = 0; i < size; ++i) to[i] = from[i] * factor;
}

}  // namespace

void Recurrence::prepare_token(const RecurrenceCall& call, std::int64_t token) {
  for (std::int64_t head = 0; head < call.num_heads; ++head) {
    const float* steps = call.step.data + token * call.step.token_stride + head * call.step.head_stride;
    const std::int64_t first = (token * call.num_heads + head) * call.steps_per_head;
    float last_step = 0.0F;
    for (std::int64_t i = 0; i < call.steps_per_head; ++i) {
      float step = softplus(steps[i] + call.step_bias[head * call.steps_per_head + i]);
      if (!call.is_delta_rule()) step = std::clamp(step, call.min_step, call.max_step);
      decays_[static_cast<std::size_t>(first + i)] = std::exp(-call.rate[head] * step);
      last_step = step;
    }
    const auto place = static_cast<std::size_t>(token * call.num_heads + head);
    strengths_[place] = call.is_delta_rule()
                            ? sigmoid(call.strength_logits[token * call.strength_token_stride + head])
                            : last_step;
  }
  if (!call.is_delta_rule()) return;
  const float query_length = 1.0F / std::sqrt(static_cast<float>(call.key_dim));
  for (std::int64_t head = 0; head < call.num_key_heads; ++head) {
    const auto place = static_cast<std::size_t>((token * call.num_key_heads + head) * call.key_dim);
    bring_to_length(call.query.data + token * call.query.token_stride + head * call.query.head_stride,
                    &queries_[place], call.key_dim, query_length);
    bring_to_length(call.key.data + token * call.key.token_stride + head * call.key.head_stride,
                    &keys_[place], call.key_dim, 1.0F);
  }
}

void Recurrence::prepare(const RecurrenceCall& call, WorkerPool& pool) {
  const std::int64_t num_tokens = call.rows.num_tokens;
  decays_.resize(static_cast<std::size_t>(num_tokens * call.num_heads * call.steps_per_head));
  strengths_.resize(static_cast<std::size_t>(num_tokens * call.num_heads));
  if (call.is_delta_rule()) {
    queries_.resize(static_cast<std::size_t>(num_tokens * call.num_key_heads * call.key_dim));
    keys_.resize(queries_.size());
  }
  const std::int64_t work_per_token =
      16 * call.num_heads * call.steps_per_head + 2 * call.num_key_heads * call.key_dim;
  share_out(pool, num_tokens, num_tokens * work_per_token,
            [&](std::int64_t token) { prepare_token(call, token); });
}

// One row, head and slab of columns, from its input snapshot to its output snapshot.
void Recurrence::recur_columns(const RecurrenceCall& call, std::int64_t row, std::int64_t first_token,
                               std::int64_t head, std::int64_t column, float* state) const {
  const auto num_columns = std::min<std::int64_t>(kColumnsPerTask, call.value_dim - column);
  const auto snapshot = [&](std::int32_t block) {
    return call.states + block * call.state_block_stride + head * call.key_dim * call.value_dim + column;
  };
  const auto save = [&](std::int32_t block) {
    float* to = snapshot(block);
    for (std::int64_t i = 0; i < call.key_dim; ++i) {
      std::copy_n(state + i * kColumnsPerTask, num_columns, to + i * call.value_dim);
    }
  };
  std::fill_n(state, call.key_dim * kColumnsPerTask, 0.0F);
  if (call.rows.input_blocks[row] != kNoBlock) {
    const float* from = snapshot(call.rows.input_blocks[row]);
    for (std::int64_t i = 0; i < call.key_dim; ++i) {
      std::copy_n(from + i * call.value_dim, num_columns, state + i * kColumnsPerTask);
    }
  }
  const std::int64_t key_head = head * call.num_key_heads / call.num_heads;
  const auto recur_tokens = [&](std::int64_t begin, std::int64_t end) {
    RecurrenceTask task;
    const std::int64_t token = first_token + begin;
    if (call.is_delta_rule()) {
      task.query = queries_.data() + (token * call.num_key_heads + key_head) * call.key_dim;
      task.key = keys_.data() + (token * call.num_key_heads + key_head) * call.key_dim;
      task.query_stride = task.key_stride = call.num_key_heads * call.key_dim;
    } else {
      task.query = call.query.data + token * call.query.token_stride + key_head * call.query.head_stride;
      task.query_stride = call.query.token_stride;
      task.key = call.key.data + token * call.key.token_stride + key_head * call.key.head_stride;
      task.key_stride = call.key.token_stride;
    }
    task.value = call.value.data + token * call.value.token_stride + head * call.value.head_stride + column;
    task.value_stride = call.value.token_stride;
    task.decay = decays_.data() + (token * call.num_heads + head) * call.steps_per_head;
    task.decay_stride = call.num_heads * call.steps_per_head;
    task.decays_by_row = call.steps_per_head > 1;
    task.strength = strengths_.data() + token * call.num_heads + head;
    task.strength_stride = call.num_heads;
    task.subtracts_recalled = call.is_delta_rule();
    task.skip = call.skip == nullptr ? 0.0F : call.skip[head];
    task.output =
        call.output.data + token * call.output.token_stride + head * call.output.head_stride + column;
    task.output_stride = call.output.token_stride;
    task.state = state;
    task.num_tokens = static_cast<int>(end - begin);
    task.key_dim = static_cast<int>(call.key_dim);
    task.num_columns = static_cast<int>(num_columns);
    recurrence_(task);
  };
  const std::int64_t checkpoint = call.rows.checkpoint_lengths[row];
  if (checkpoint > 0) {
    recur_tokens(0, checkpoint);
    save(call.rows.checkpoint_blocks[row]);
  }
  recur_tokens(checkpoint, call.rows.lengths[row]);
  save(call.rows.output_blocks[row]);
}

void Recurrence::recur(const RecurrenceCall& call, WorkerPool& pool) {
  call.rows.validate();
  prepare(call, pool);
  const std::vector<std::int64_t> firsts = first_tokens(call.rows);
  const std::int64_t slabs = (call.value_dim + kColumnsPerTask - 1) / kColumnsPerTask;
  const std::int64_t items_per_row = call.num_heads * slabs;
  const std::int64_t work = call.rows.num_tokens * call.num_heads * call.key_dim * call.value_dim;
  share_out(pool, call.rows.num_rows * items_per_row, work, [&](std::int64_t item) {
    thread_local std::vector<float> state;
    const auto num_floats = static_cast<std::size_t>(call.key_dim * kColumnsPerTask);
    if (state.size() < num_floats) state.resize(num_floats);
    const std::int64_t row = item / items_per_row;
    const std::int64_t head = item % items_per_row / slabs;
    const std::int64_t column = item % slabs * kColumnsPerTask;
    recur_columns(call, row, firsts[static_cast<std::size_t>(row)], head, column, state.data());
  });
}

namespace {

// The last inputs before the first `num_tokens` tokens of a row have ended: oldest first, as a snapshot has
// them.
void save_inputs(const ConvTask& task, int num_tokens, float* to, std::int64_t to_stride) {
  const int num_before = task.width - 1;
  for (int k = 0; k < num_before; ++k) {
    const int from = num_tokens - num_before + k;
    const float* x = from >= 0 ? task.input + from * task.input_stride
                               : task.history + (num_before + from) * task.history_stride;
    std::copy_n(x, task.num_channels, to + k * to_stride);
  }
}

void convolve_channels(const ConvCall& call, ConvCore core, std::int64_t row, std::int64_t first_token,
                       std::int64_t channel) {
  const auto count = std::min(kChannelsPerItem, call.num_channels - channel);
  const int num_before = call.width - 1;
  const auto snapshot = [&](std::int32_t block) {
    return call.states + block * call.state_block_stride + channel;
  };
  // A copy, because the output may be the input.
  std::vector<float> history(static_cast<std::size_t>(num_before * count));
  if (call.rows.input_blocks[row] != kNoBlock) {
    const float* from = snapshot(call.rows.input_blocks[row]);
    for (int k = 0; k < num_before; ++k)
      std::copy_n(from + k * call.num_channels, count, &history[k * count]);
  }
  ConvTask task;
  task.input = call.input + first_token * call.input_stride + channel;
  task.input_stride = call.input_stride;
  task.history = history.data();
  task.history_stride = count;
  task.weight = call.weight + channel;
  task.weight_stride = call.num_channels;
  task.bias = call.bias == nullptr ? nullptr : call.bias + channel;
  task.output = call.output + first_token * call.output_stride + channel;
  task.output_stride = call.output_stride;
  task.num_tokens = call.rows.lengths[row];
  task.width = call.width;
  task.num_channels = static_cast<int>(count);
  core(task);
  if (call.rows.checkpoint_blocks[row] != kNoBlock) {
    save_inputs(task, call.rows.checkpoint_lengths[row], snapshot(call.rows.checkpoint_blocks[row]),
                call.num_channels);
  }
  save_inputs(task, call.rows.lengths[row], snapshot(call.rows.output_blocks[row]), call.num_channels);
}

}  // namespace

void Recurrence::convolve(const ConvCall& call, WorkerPool& pool) {
  call.rows.validate();
  const std::vector<std::int64_t> firsts = first_tokens(call.rows);
  const std::int64_t slabs = (call.num_channels + kChannelsPerItem - 1) / kChannelsPerItem;
  share_out(pool, call.rows.num_rows * slabs, call.rows.num_tokens * call.num_channels * call.width,
            [&](std::int64_t item) {
              const std::int64_t row = item / slabs;
              convolve_channels(call, conv_, row, firsts[static_cast<std::size_t>(row)],
                                item % slabs * kChannelsPerItem);
            });
}

}  // namespace pdmesh::kernels
