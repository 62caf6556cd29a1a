// Whether runs may be posted: looked at before anything is sent, all of them in one pass per rule.
//
// Knows intervals only; whose memory they describe is the caller's business.
#pragma once

#include <cstddef>
#include <span>

#include "frames.h"
#include "span.h"

namespace pdmesh::transfer {

enum class RunFault {
  kNone,
  kMalformed,      // an address or length is not in (0, 2**62)
  kSourceOutside,  // no single region of the sources holds it
  kTargetOutside,
  kWrittenTwice,  // two runs write the same byte
};

struct RunVerdict {
  RunFault fault = RunFault::kNone;
  std::size_t first = 0;   // the run concerned
  std::size_t second = 0;  // the other one, of two that write the same byte
};

// The first fault by the order of the rules above. `sources` and `targets`: in order and disjoint. Numbers
// that were negative before they were taken for addresses are malformed.
RunVerdict check_runs(std::span<const Piece> runs, std::span<const Span> sources,
                      std::span<const Span> targets);

}  // namespace pdmesh::transfer
