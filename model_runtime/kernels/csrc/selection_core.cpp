// Compiled once per instruction set. Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (the lightning indexer).
#include "selection_core.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

Vec load_some(const float* from, int count) {
  if (count >= kLanes) return load(from);
  Vec result = {};
  for (int i = 0; i < count; ++i) result[i] = from[i];
  return result;
}

Vec dot(const float* query, const float* const (&keys)[kLanes], int head_dim) {
  Vec sums[kLanes] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vec q = load_some(query + d, head_dim - d);
    for (int j = 0; j < kLanes; ++j) sums[j] += q * load_some(keys[j] + d, head_dim - d);
  }
  return sum_lanes(sums);
}

}  // namespace

void score_rows(const SelectionTask& task) {
  for (int first = 0; first < task.num_keys; first += kLanes) {
    // Rows past the end repeat the last one.
    const float* keys[kLanes];
    for (int j = 0; j < kLanes; ++j) keys[j] = task.keys[std::min(first + j, task.num_keys - 1)];
    Vec scores = {};
    for (int head = 0; head < task.num_heads; ++head) {
      const Vec found = dot(task.queries + head * task.query_head_stride, keys, task.head_dim);
      scores += task.weights[head] * (found > Vec{} ? found : Vec{});
    }
    for (int j = 0; j < std::min(kLanes, task.num_keys - first); ++j) task.scores[first + j] = scores[j];
  }
}

int find_largest(const float* numbers, int width) {
  Vec best = broadcast(-std::numeric_limits<float>::infinity());
  IntVec places = {};
  IntVec is_nan = {};
  IntVec indices = {};
  for (int lane = 0; lane < kLanes; ++lane) indices[lane] = lane;
  int i = 0;
  for (; i + kLanes <= width; i += kLanes, indices += kLanes) {
    const Vec x = load(numbers + i);
    const IntVec is_larger = x > best;
    best = is_larger ? x : best;
    places = is_larger ? indices : places;
    is_nan |= x != x;
  }
  int place = places[0];
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    has_nan |= is_nan[lane] != 0;
    const bool is_first = numbers[places[lane]] == numbers[place] && places[lane] < place;
    if (numbers[places[lane]] > numbers[place] || is_first) place = places[lane];
  }
  for (; i < width; ++i) {
    has_nan |= std::isnan(numbers[i]);
    if (numbers[i] > numbers[place]) place = i;
  }
  if (!has_nan) return place;
  return static_cast<int>(std::find_if(numbers, numbers + width, [](float x) { return std::isnan(x); }) -
                          numbers);
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
