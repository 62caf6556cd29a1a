#include "run_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

namespace pdmesh::transfer {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kNumDigits = std::size_t{1} << kDigitBits;

struct Target {
  std::uint64_t begin;
  std::uint64_t index;
};

bool is_sound(std::uint64_t number) {
  return number > 0 && number < kMaxAddress;
}

bool holds(const Span& region, std::uint64_t begin, std::uint64_t num_bytes) {
  return region.begin <= begin && begin + num_bytes <= region.end;
}

// Index of the first run whose `address` side no single region holds.
std::optional<std::size_t> first_outside(std::span<const Piece> runs, std::uint64_t Piece::* address,
                                         std::span<const Span> regions) {
  const Span* last = nullptr;  // neighbours mostly lie in one region
  for (std::size_t index = 0; index < runs.size(); ++index) {
    const std::uint64_t begin = runs[index].*address;
    if (last && holds(*last, begin, runs[index].num_bytes)) continue;
    const auto after =
        std::upper_bound(regions.begin(), regions.end(), begin,
                         [](std::uint64_t value, const Span& region) { return value < region.begin; });
    if (after == regions.begin()) return index;
    last = &*std::prev(after);
    if (!holds(*last, begin, runs[index].num_bytes)) return index;
  }
  return std::nullopt;
}

// By their begin: radix sort, for a comparing one takes longer than everything else that is checked. Of the
// bits only those count in which targets differ.
std::vector<Target> sorted_targets(std::span<const Piece> runs) {
  const auto before = [](const Piece& left, const Piece& right) { return left.target < right.target; };
  const std::uint64_t lowest = std::min_element(runs.begin(), runs.end(), before)->target;
  std::vector<Target> targets(runs.size()), sorted(runs.size());
  std::uint64_t differing = 0;
  for (std::size_t index = 0; index < runs.size(); ++index) {
    targets[index] = {runs[index].target, index};
    differing |= runs[index].target - lowest;
  }
  const int end_bit = static_cast<int>(std::bit_width(differing));
  for (int bit = differing ? std::countr_zero(differing) : end_bit; bit < end_bit; bit += kDigitBits) {
    const auto digit = [&](const Target& target) { return ((target.begin - lowest) >> bit) % kNumDigits; };
    std::array<std::size_t, kNumDigits> places{};
    for (const Target& target : targets) ++places[digit(target)];
    std::size_t num_before = 0;
    for (std::size_t& place : places) num_before += std::exchange(place, num_before);
    for (const Target& target : targets) sorted[places[digit(target)]++] = target;
    targets.swap(sorted);
  }
  return targets;
}

bool are_in_order(std::span<const Piece> runs) {
  for (std::size_t index = 1; index < runs.size(); ++index) {
    if (runs[index - 1].target + runs[index - 1].num_bytes > runs[index].target) return false;
  }
  return true;
}

RunVerdict check_overlap(std::span<const Piece> runs) {
  // Most writes are in order already.
  if (are_in_order(runs)) return {};
  const std::vector<Target> targets = sorted_targets(runs);
  for (std::size_t place = 1; place < targets.size(); ++place) {
    const Target& left = targets[place - 1];
    if (left.begin + runs[left.index].num_bytes > targets[place].begin) {
      return {RunFault::kWrittenTwice, left.index, targets[place].index};
    }
  }
  return {};
}

}  // namespace

RunVerdict check_runs(std::span<const Piece> runs, std::span<const Span> sources,
                      std::span<const Span> targets) {
  // Sums that wrap would pass what follows.
  const auto is_bad = [](const Piece& run) {
    return !is_sound(run.source) || !is_sound(run.target) || !is_sound(run.num_bytes);
  };
  const auto bad = std::find_if(runs.begin(), runs.end(), is_bad);
  if (bad != runs.end()) {
    return {RunFault::kMalformed, static_cast<std::size_t>(bad - runs.begin()), 0};
  }
  if (const auto index = first_outside(runs, &Piece::source, sources)) {
    return {RunFault::kSourceOutside, *index, 0};
  }
  if (const auto index = first_outside(runs, &Piece::target, targets)) {
    return {RunFault::kTargetOutside, *index, 0};
  }
  return check_overlap(runs);
}

}  // namespace pdmesh::transfer
