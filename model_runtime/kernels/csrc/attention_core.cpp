// Compiled once per instruction set; PDMESH_LANES floats fill one vector register.
//
// Numerics: float32 throughout. A score is a dot product accumulated per lane over the head dimension and
// then summed over lanes by a fixed tree; the softmax runs online over steps of kKeysPerStep keys, anew for
// each part of kKeysPerPart, and parts are joined in order. Source: Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax".
#include "attention_core.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

constexpr int kQueriesPerGroup =
    kLanes == 16 ? 4 : (kLanes == 8 ? 3 : 2);  // as many as the registers hold next to their sums
constexpr int kVectorsPerSlice = 4;
constexpr int kPaddingFloats =
    16;  // of a head, equal for every variant so that scratch_floats has one answer
constexpr int kFloatsPerCacheLine = 16;
constexpr int kSecondLevel = 2;  // of the caches, in the compiler's terms
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

int padded_head_dim(int head_dim) {
  return (head_dim + kPaddingFloats - 1) / kPaddingFloats * kPaddingFloats;
}

// ---- one step of keys ----

// The keys of some positions that follow one another: those on pages that are present, in order.
struct KeyStep {
  const float* key_rows[kKeysPerStep];
  const float* value_rows[kKeysPerStep];
  int num_keys = 0;
  int num_positions = 0;
  int keys_before[kKeysPerStep + 1];  // how many of the keys lie at the first i positions
};

// What some keys come to for the tile's queries, one entry per (token, head of the group).
struct Gathered {
  float* output;  // [num_queries, padded], not yet divided by the sum
  float* max;
  float* sum;

  static Gathered at(float* floats, int num_queries, int padded) {
    float* max = floats + num_queries * padded;
    return {floats, max, max + num_queries};
  }
};

// Running state of the tile's queries.
struct QueryState {
  float* query;    // [num_queries, padded]
  float* weights;  // [kQueriesPerGroup, kKeysPerStep]
  float* packed;   // [2, kKeysPerStep, padded]
  Gathered part;   // of the part that is being attended to
  Gathered whole;  // of the parts before it
  int num_queries = 0;
  int padded = 0;
};

QueryState lay_out(const AttentionTile& tile, float* scratch) {
  QueryState state{};
  state.num_queries = tile.num_tokens * tile.num_group_heads;
  state.padded = padded_head_dim(tile.head_dim);
  state.query = scratch;
  state.packed = state.query + state.num_queries * state.padded;
  state.weights = state.packed + 2 * kKeysPerStep * state.padded;
  float* gathered = state.weights + 4 * kKeysPerStep;
  const std::int64_t floats = part_floats(tile.num_tokens, tile.num_group_heads, tile.head_dim);
  state.part = Gathered::at(gathered, state.num_queries, state.padded);
  state.whole = Gathered::at(gathered + floats, state.num_queries, state.padded);
  return state;
}

void load_queries(const AttentionTile& tile, const QueryState& state) {
  for (int token = 0; token < tile.num_tokens; ++token) {
    for (int head = 0; head < tile.num_group_heads; ++head) {
      const int index = token * tile.num_group_heads + head;
      const float* from = tile.query + token * tile.query_token_stride + head * tile.head_dim;
      float* to = state.query + index * state.padded;
      for (int d = 0; d < tile.head_dim; ++d) to[d] = from[d] * tile.scale;
      std::fill(to + tile.head_dim, to + state.padded, 0.0F);
    }
  }
}

void begin_part(const QueryState& state) {
  std::fill_n(state.part.output, state.num_queries * state.padded, 0.0F);
  std::fill_n(state.part.max, state.num_queries, kNegativeInfinity);
  std::fill_n(state.part.sum, state.num_queries, 0.0F);
}

const float* pack_row(const float* from, float* to, int head_dim, int padded) {
  std::copy_n(from, head_dim, to);
  std::fill(to + head_dim, to + padded, 0.0F);
  return to;
}

// Rows past num_keys repeat the last one, so that whole vectors of keys can be scored without a branch.
KeyStep find_rows(const AttentionTile& tile, const QueryState& state, int first_position, int num_positions) {
  KeyStep step;
  step.num_positions = num_positions;
  int num_keys = 0;
  int slot = first_position / tile.page_tokens;
  int token = first_position % tile.page_tokens;
  for (int j = 0; j < num_positions; ++j) {
    const std::int64_t page = tile.page_table[slot];
    step.keys_before[j] = num_keys;
    if (page != kAbsentPage) {
      step.key_rows[num_keys] = tile.key.base + page * tile.key.page_stride + token * tile.key.token_stride;
      step.value_rows[num_keys] =
          tile.value.base + page * tile.value.page_stride + token * tile.value.token_stride;
      ++num_keys;
    }
    if (++token == tile.page_tokens) {
      token = 0;
      ++slot;
    }
  }
  step.keys_before[num_positions] = num_keys;
  step.num_keys = num_keys;
  if (num_keys == 0) return step;
  std::fill(step.key_rows + num_keys, step.key_rows + kKeysPerStep, step.key_rows[num_keys - 1]);
  std::fill(step.value_rows + num_keys, step.value_rows + kKeysPerStep, step.value_rows[num_keys - 1]);
  if (tile.head_dim == state.padded) return step;
  for (int j = 0; j < kKeysPerStep; ++j) {
    float* key = state.packed + j * state.padded;
    float* value = key + kKeysPerStep * state.padded;
    step.key_rows[j] = pack_row(step.key_rows[j], key, tile.head_dim, state.padded);
    step.value_rows[j] = pack_row(step.value_rows[j], value, tile.head_dim, state.padded);
  }
  return step;
}

// Adds the products of kVectors vectors from `d` on. A key's row is looked up once for all of them: there are
// more rows than registers to hold their addresses.
template <int kVectors>
inline void add_products(const float* query, const float* const* rows, int d, Vec (&sums)[kLanes]) {
  Vec q[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) q[v] = load(query + d + v * kLanes);
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    const float* row = rows[j] + d;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[j] += q[v] * load(row + v * kLanes);
  }
}

Vec score_keys(const float* query, const float* const* rows, int padded) {
  Vec sums[kLanes] = {};
  int d = 0;
  for (; d + kVectorsPerSlice * kLanes <= padded; d += kVectorsPerSlice * kLanes) {
    add_products<kVectorsPerSlice>(query, rows, d, sums);
  }
  for (; d < padded; d += kLanes) add_products<1>(query, rows, d, sums);
  return sum_lanes(sums);
}

float largest(Vec v) {
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = std::max(result, v[i]);
  return result;
}

float total(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The keys of one step that a query sees: [begin, end). Empty only if what it sees there is on absent pages.
struct VisibleKeys {
  int begin = 0;
  int end = 0;
};

// Writes the unnormalised weights of the visible keys (zeros around them), updates the running maximum and
// sum, and scales what the query has gathered so far to the new maximum.
void weigh_keys(const QueryState& state, int index, const KeyStep& step, VisibleKeys visible,
                float* weights) {
  if (visible.begin == visible.end) {
    std::fill_n(weights, kKeysPerStep, 0.0F);
    return;
  }
  Vec best = broadcast(kNegativeInfinity);
  const int first_scored = visible.begin / kLanes * kLanes;
  const int num_scored = (visible.end + kLanes - 1) / kLanes * kLanes;
  for (int j = first_scored; j < num_scored; j += kLanes) {
    Vec scores = score_keys(state.query + index * state.padded, step.key_rows + j, state.padded);
    for (int i = 0; i < visible.begin - j; ++i) scores[i] = kNegativeInfinity;
    for (int i = visible.end - j; i < kLanes; ++i) scores[i] = kNegativeInfinity;
    store(weights + j, scores);
    best = scores > best ? scores : best;
  }
  const float old_max = state.part.max[index];
  const float new_max = std::max(old_max, largest(best));
  Vec sums = {};
  for (int j = first_scored; j < num_scored; j += kLanes) {
    const Vec weight = exp_nonpositive(load(weights + j) - new_max);
    store(weights + j, weight);
    sums += weight;
  }
  std::fill(weights, weights + first_scored, 0.0F);
  std::fill(weights + num_scored, weights + kKeysPerStep, 0.0F);
  const float rescale = exp_nonpositive(old_max - new_max);
  state.part.max[index] = new_max;
  state.part.sum[index] = state.part.sum[index] * rescale + total(sums);
  float* output = state.part.output + index * state.padded;
  for (int d = 0; d < state.padded; d += kLanes) store(output + d, load(output + d) * rescale);
}

// Keys outside [keys.begin, keys.end) are not read: no query of the group sees them, and their rows may be
// anything.
template <int kQueries>
void gather_values(const QueryState& state, int index, const KeyStep& step, VisibleKeys keys) {
  for (int d = 0; d < state.padded; d += kVectorsPerSlice * kLanes) {
    const int num_vectors = std::min(kVectorsPerSlice, (state.padded - d) / kLanes);
    float* output = state.part.output + index * state.padded + d;
    if (num_vectors == kVectorsPerSlice) {
      Vec sums[kQueries][kVectorsPerSlice];
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectorsPerSlice; ++v) sums[q][v] = load(output + q * state.padded + v * kLanes);
      }
      for (int j = keys.begin; j < keys.end; ++j) {
        const float* row = step.value_rows[j] + d;
#pragma GCC unroll 4
        for (int q = 0; q < kQueries; ++q) {
          const float weight = state.weights[q * kKeysPerStep + j];
#pragma GCC unroll 4
          for (int v = 0; v < kVectorsPerSlice; ++v) sums[q][v] += weight * load(row + v * kLanes);
        }
      }
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectorsPerSlice; ++v) store(output + q * state.padded + v * kLanes, sums[q][v]);
      }
      continue;
    }
    for (int q = 0; q < kQueries; ++q) {
      for (int v = 0; v < num_vectors; ++v) {
        Vec sum = load(output + q * state.padded + v * kLanes);
        for (int j = keys.begin; j < keys.end; ++j) {
          sum += state.weights[q * kKeysPerStep + j] * load(step.value_rows[j] + d + v * kLanes);
        }
        store(output + q * state.padded + v * kLanes, sum);
      }
    }
  }
}

template <int kQueries>
void attend_queries(const AttentionTile& tile, const QueryState& state, const KeyStep& step, int first_key,
                    int index) {
  const auto visible = [&](int query) {
    const int position = tile.first_position + query / tile.num_group_heads;
    const int begin = std::max(0, position - (tile.window_tokens - 1) - first_key);
    const int end = std::min(step.num_positions, position + 1 - first_key);
    return VisibleKeys{.begin = step.keys_before[begin], .end = step.keys_before[end]};
  };
  for (int q = 0; q < kQueries; ++q) {
    weigh_keys(state, index + q, step, visible(index + q), state.weights + q * kKeysPerStep);
  }
  gather_values<kQueries>(state, index, step,
                          {.begin = visible(index).begin, .end = visible(index + kQueries - 1).end});
}

template <int kQueries>
void attend_last_queries(const AttentionTile& tile, const QueryState& state, const KeyStep& step,
                         int first_key, int index, int end) {
  if (end - index == kQueries) {
    attend_queries<kQueries>(tile, state, step, first_key, index);
  } else if constexpr (kQueries > 1) {
    attend_last_queries<kQueries - 1>(tile, state, step, first_key, index, end);
  }
}

// The first token whose window begins behind the step's last position; tokens before it see that position, if
// the step does not begin behind them.
int end_of_seeing_tokens(const AttentionTile& tile, int first_key, int num_positions) {
  const std::int64_t last_position = std::int64_t{first_key} + num_positions - 1 + (tile.window_tokens - 1);
  return static_cast<int>(std::min<std::int64_t>(tile.num_tokens, last_position + 1 - tile.first_position));
}

void attend_step(const AttentionTile& tile, const QueryState& state, const KeyStep& step, int first_key) {
  const int first_token = std::max(0, first_key - tile.first_position);
  const int end = end_of_seeing_tokens(tile, first_key, step.num_positions) * tile.num_group_heads;
  int index = first_token * tile.num_group_heads;
  for (; index + kQueriesPerGroup <= end; index += kQueriesPerGroup) {
    attend_queries<kQueriesPerGroup>(tile, state, step, first_key, index);
  }
  attend_last_queries<kQueriesPerGroup - 1>(tile, state, step, first_key, index, end);
}

// ---- parts ----

int end_position(const AttentionTile& tile) {
  return tile.first_position + tile.num_tokens;
}

// Asks for the rows of some positions: they are short pieces far apart, which the hardware does not foresee.
void prefetch_rows(const AttentionTile& tile, int first_position, int num_positions) {
  for (int position = first_position; position < first_position + num_positions; ++position) {
    const std::int64_t page = tile.page_table[position / tile.page_tokens];
    if (page == kAbsentPage) continue;
    const int token = position % tile.page_tokens;
    for (const HeadRows* rows : {&tile.key, &tile.value}) {
      const float* row = rows->base + page * rows->page_stride + token * rows->token_stride;
      for (int d = 0; d < tile.head_dim; d += kFloatsPerCacheLine)
        __builtin_prefetch(row + d, 0, kSecondLevel);
    }
  }
}

void attend_keys_of_part(const AttentionTile& tile, int part, const QueryState& state) {
  begin_part(state);
  const int begin = std::max(part * kKeysPerPart, tile.first_visible() / kKeysPerStep * kKeysPerStep);
  const int end = std::min((part + 1) * kKeysPerPart, end_position(tile));
  for (int first_key = begin; first_key < end; first_key += kKeysPerStep) {
    const KeyStep step = find_rows(tile, state, first_key, std::min(kKeysPerStep, end - first_key));
    const int next_key = first_key + kKeysPerStep;
    prefetch_rows(tile, next_key, std::min(kKeysPerStep, end - next_key));
    if (step.num_keys > 0) attend_step(tile, state, step, first_key);
  }
}

// A query that sees nothing of the part has gathered no weight there and keeps its bits; one that saw nothing
// before takes the part's. One copy of the
// code, because the compiler may fuse a sum of two products either way.
__attribute__((noinline)) void join(const Gathered& whole, const Gathered& part, int num_queries,
                                    int padded) {
  for (int index = 0; index < num_queries; ++index) {
    if (part.sum[index] == 0.0F) continue;
    const float max = std::max(whole.max[index], part.max[index]);
    const float keep = exp_nonpositive(whole.max[index] - max);
    const float take = exp_nonpositive(part.max[index] - max);
    whole.max[index] = max;
    whole.sum[index] = whole.sum[index] * keep + part.sum[index] * take;
    float* to = whole.output + index * padded;
    const float* from = part.output + index * padded;
    for (int d = 0; d < padded; d += kLanes) store(to + d, load(to + d) * keep + load(from + d) * take);
  }
}

void store_outputs(const AttentionTile& tile, const Gathered& whole, int padded) {
  for (int token = 0; token < tile.num_tokens; ++token) {
    for (int head = 0; head < tile.num_group_heads; ++head) {
      const int index = token * tile.num_group_heads + head;
      const float* from = whole.output + index * padded;
      float* to = tile.output + token * tile.output_token_stride + head * tile.head_dim;
      const float sum = whole.sum[index];
      if (tile.log_sum_exp != nullptr) {
        tile.log_sum_exp[token * tile.log_sum_exp_token_stride + head] =
            sum == 0.0F ? kNegativeInfinity : whole.max[index] + std::log(sum);
        if (sum == 0.0F) {
          std::fill_n(to, tile.head_dim, 0.0F);
          continue;
        }
      }
      for (int d = 0; d < tile.head_dim; ++d) to[d] = from[d] / sum;
    }
  }
}

void attend_tile(const AttentionTile& tile, float* scratch) {
  QueryState state = lay_out(tile, scratch);
  load_queries(tile, state);
  const int first_part = tile.first_visible() / kKeysPerPart;
  attend_keys_of_part(tile, first_part, state);
  std::swap(state.part, state.whole);
  for (int part = first_part + 1; part * kKeysPerPart < end_position(tile); ++part) {
    attend_keys_of_part(tile, part, state);
    join(state.whole, state.part, state.num_queries, state.padded);
  }
  store_outputs(tile, state.whole, state.padded);
}

void attend_part(const AttentionTile& tile, int part, float* result, float* scratch) {
  QueryState state = lay_out(tile, scratch);
  state.part = Gathered::at(result, state.num_queries, state.padded);
  load_queries(tile, state);
  attend_keys_of_part(tile, part, state);
}

void join_parts(const AttentionTile& tile, float* results, int num_parts) {
  const int num_queries = tile.num_tokens * tile.num_group_heads;
  const int padded = padded_head_dim(tile.head_dim);
  const Gathered whole = Gathered::at(results, num_queries, padded);
  const std::int64_t stride = part_floats(tile.num_tokens, tile.num_group_heads, tile.head_dim);
  for (int part = 1; part < num_parts; ++part) {
    join(whole, Gathered::at(results + part * stride, num_queries, padded), num_queries, padded);
  }
  store_outputs(tile, whole, padded);
}

}  // namespace

AttentionCore attention_core() {
  return {&attend_tile, &attend_part, &join_parts};
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
