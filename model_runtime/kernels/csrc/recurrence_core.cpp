// Compiled once per instruction set. Source: Yang et al. 2024, "Gated delta networks" (the delta rule with a
// decay per head); Kimi Team 2025, "Kimi Linear" (a decay per key channel); Dao and Gu 2024, "Transformers
// are SSMs" (no subtraction, with a skip). All three are evaluated token by token, so that no token's result
// depends on where a chunk ends.
#include "recurrence_core.h"

#include <algorithm>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

constexpr int kVectors = 4;  // columns that are kept in registers at a time
constexpr int kColumnsPerPass = kVectors * kLanes;
static_assert(kColumnsPerTask % kColumnsPerPass == 0);

struct Columns {
  Vec parts[kVectors];
};

Columns load_columns(const float* from, int count) {
  Columns columns = {};
  float padded[kColumnsPerPass] = {};
  if (count < kColumnsPerPass) {
    std::copy_n(from, count, padded);
    from = padded;
  }
  for (int v = 0; v < kVectors; ++v) columns.parts[v] = load(from + v * kLanes);
  return columns;
}

void store_columns(float* to, const Columns& columns, int count) {
  if (count >= kColumnsPerPass) {
    for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, columns.parts[v]);
    return;
  }
  float padded[kColumnsPerPass];
  for (int v = 0; v < kVectors; ++v) store(padded + v * kLanes, columns.parts[v]);
  std::copy_n(padded, count, to);
}

Columns operator*(const Columns& columns, float factor) {
  Columns product;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) product.parts[v] = columns.parts[v] * factor;
  return product;
}

// Decays the columns, and gives what the key recalls of them.
template <bool kDecaysByRow>
Columns decay_and_recall(float* state, const float* decay, const float* key, int key_dim) {
  Columns recalled = {};
  for (int i = 0; i < key_dim; ++i) {
    float* row = state + static_cast<std::int64_t>(i) * kColumnsPerTask;
    const Vec factor = broadcast(decay[kDecaysByRow ? i : 0]);
    const Vec weight = broadcast(key[i]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec kept = load(row + v * kLanes) * factor;
      store(row + v * kLanes, kept);
      recalled.parts[v] += weight * kept;
    }
  }
  return recalled;
}

// Writes under the key, and reads with the query. A state that was not decayed before is decayed here.
template <bool kDecays, bool kDecaysByRow>
Columns write_and_read(float* state, const float* decay, const float* key, const float* query,
                       const Columns& written, int key_dim) {
  Columns read = {};
  for (int i = 0; i < key_dim; ++i) {
    float* row = state + static_cast<std::int64_t>(i) * kColumnsPerTask;
    const Vec factor = broadcast(kDecays ? decay[kDecaysByRow ? i : 0] : 1.0F);
    const Vec weight = broadcast(key[i]);
    const Vec attention = broadcast(query[i]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec before = load(row + v * kLanes);
      const Vec after = (kDecays ? before * factor : before) + weight * written.parts[v];
      store(row + v * kLanes, after);
      read.parts[v] += attention * after;
    }
  }
  return read;
}

template <bool kDelta, bool kDecaysByRow>
void recur_columns(const RecurrenceTask& task, int column) {
  float* state = task.state + column;
  const int count = task.num_columns - column;
  for (std::int64_t token = 0; token < task.num_tokens; ++token) {
    const float* key = task.key + token * task.key_stride;
    const float* query = task.query + token * task.query_stride;
    const float* decay = task.decay + token * task.decay_stride;
    const float strength = task.strength[token * task.strength_stride];
    const Columns value = load_columns(task.value + token * task.value_stride + column, count);
    Columns written = value;
    if constexpr (kDelta) {
      const Columns recalled = decay_and_recall<kDecaysByRow>(state, decay, key, task.key_dim);
      for (int v = 0; v < kVectors; ++v) written.parts[v] -= recalled.parts[v];
    }
    Columns read =
        write_and_read<!kDelta, kDecaysByRow>(state, decay, key, query, written * strength, task.key_dim);
    for (int v = 0; v < kVectors; ++v) read.parts[v] += value.parts[v] * task.skip;
    store_columns(task.output + token * task.output_stride + column, read, count);
  }
}

Vec load_some(const float* from, int count) {
  if (count >= kLanes) return load(from);
  Vec result = {};
  for (int i = 0; i < count; ++i) result[i] = from[i];
  return result;
}

void store_some(float* to, Vec value, int count) {
  if (count >= kLanes) return store(to, value);
  for (int i = 0; i < count; ++i) to[i] = value[i];
}

Vec silu(Vec x) {
  const Vec decayed = exp_nonpositive(x < Vec{} ? x : -x);
  const Vec inverse = 1.0F / (1.0F + decayed);
  return x * (x < Vec{} ? decayed * inverse : inverse);
}

}  // namespace

void recur(const RecurrenceTask& task) {
  const auto columns =
      task.subtracts_recalled
          ? (task.decays_by_row ? &recur_columns<true, true> : &recur_columns<true, false>)
          : (task.decays_by_row ? &recur_columns<false, true> : &recur_columns<false, false>);
  for (int column = 0; column < task.num_columns; column += kColumnsPerPass) columns(task, column);
}

void convolve(const ConvTask& task) {
  const int num_before = task.width - 1;
  for (int token = 0; token < task.num_tokens; ++token) {
    float* output = task.output + token * task.output_stride;
    for (int channel = 0; channel < task.num_channels; channel += kLanes) {
      const int count = task.num_channels - channel;
      Vec sum = task.bias == nullptr ? Vec{} : load_some(task.bias + channel, count);
      for (int k = 0; k < task.width; ++k) {
        const int from = token - num_before + k;
        const float* x = from >= 0 ? task.input + from * task.input_stride
                                   : task.history + (num_before + from) * task.history_stride;
        sum +=
            load_some(task.weight + k * task.weight_stride + channel, count) * load_some(x + channel, count);
      }
      store_some(output + channel, silu(sum), count);
    }
  }
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
