// ResultsOut: the rows of one request whose results have not landed, oldest first.
//
// Each is known by the most tokens that its result can bring: none for a chunk before the last of a prompt,
// one for the last, the inputs of a decode row. Every row but the chunks before the last brings at least one.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>

#include "support/errors.h"

namespace pdmesh {

class ResultsOut {
 public:
  // A row may be planned while one result is out.
  static constexpr std::int32_t kMaxNumResults = 2;

  std::int32_t num() const { return num_; }
  // What all of them together bring at most.
  std::int32_t max_tokens() const {
    return std::accumulate(max_tokens_.begin(), max_tokens_.end(), std::int32_t{0});
  }
  // What the oldest brings at most. REQUIRES: num() > 0.
  std::int32_t oldest_max_tokens() const { return max_tokens_[0]; }

  void Add(std::int32_t max_tokens) {
    Ensure(num_ < kMaxNumResults, "a row was planned while too many results were out");
    max_tokens_[static_cast<std::size_t>(num_++)] = max_tokens;
  }
  // The oldest has landed. REQUIRES: num() > 0.
  void Land() {
    Ensure(num_ > 0, "a result landed that was not out");
    max_tokens_ = {max_tokens_[1], 0};
    --num_;
  }

 private:
  std::array<std::int32_t, kMaxNumResults> max_tokens_{};  // 0 behind the last
  std::int32_t num_ = 0;
};

}  // namespace pdmesh
