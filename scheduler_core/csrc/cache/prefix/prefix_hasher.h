// Identity of prompt prefixes: one chained SHA-256 digest per grain (a full stretch of prefix_granularity
// tokens).
//
// Digests are 32 raw bytes; hexadecimal exists only at the edges of the core.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/sha256.h"

namespace pdmesh {

// Digest of one grain. `previous` is empty for the first grain. Throws nothing.
// Layout, all numbers u32 little-endian: length of the previous digest, that digest, token count, the tokens;
// and only if extra keys exist their count, then each key after its length.
Digest HashGrain(std::span<const std::uint8_t> previous, std::span<const std::int32_t> tokens,
                 std::span<const std::string> extra_keys);

std::string HexOf(std::span<const std::uint8_t> bytes);

// The digests of one request's full grains. It only ever grows, so a grain is hashed once in a request's life
// whatever happens to the request's admissions.
class GrainChain {
 public:
  GrainChain(std::int32_t prefix_granularity, std::vector<std::string> extra_keys);

  // Continues the chain until it has `num_grains` digests; does nothing if it has them already.
  // `tokens` are all tokens of the request. REQUIRES: they cover num_grains full grains and never change once
  // hashed.
  void ExtendTo(std::span<const std::int32_t> tokens, std::int32_t num_grains);

  std::span<const Digest> digests() const { return digests_; }

 private:
  Digest HashNext(std::span<const std::int32_t> grain);

  std::int32_t prefix_granularity_;
  std::vector<std::string> extra_keys_;
  std::vector<Digest> digests_;
  std::vector<std::uint8_t>
      message_;  // padded message of a chained grain, made once; digest and tokens change
};

}  // namespace pdmesh
