#include "cache/prefix/prefix_hasher.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>

namespace pdmesh {
namespace {

using Tokens = std::vector<std::int32_t>;
using Keys = std::vector<std::string>;

// behaviour: D2
TEST(PrefixHasher, AnEmptyGrainHasTheKnownDigest) {
  EXPECT_EQ(HexOf(HashGrain({}, {}, {})), "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc");
}

// behaviour: D3
TEST(PrefixHasher, ExtraKeysAreToldApartByTheirBorders) {
  const Tokens tokens = {1, 2};
  const Digest two_one = HashGrain({}, tokens, Keys{"ab", "c"});
  const Digest one_two = HashGrain({}, tokens, Keys{"a", "bc"});
  const Digest joined = HashGrain({}, tokens, Keys{"abc"});
  EXPECT_NE(two_one, one_two);
  EXPECT_NE(two_one, joined);
  EXPECT_NE(one_two, joined);
}

// behaviour: D3
TEST(PrefixHasher, APreviousDigestIsNotMistakenForTokensOfTheSameBytes) {
  const Digest previous = HashGrain({}, Tokens{1}, {});
  Tokens same_bytes(8);
  std::memcpy(same_bytes.data(), previous.data(), previous.size());
  EXPECT_NE(HashGrain(previous, {}, {}), HashGrain({}, same_bytes, {}));
}

// behaviour: D3
TEST(PrefixHasher, AKeyIsNotMistakenForTrailingTokens) {
  const std::string key(4, '\x01');
  Tokens tokens = {9, 1, 4};
  std::int32_t key_as_token;
  std::memcpy(&key_as_token, key.data(), 4);
  tokens.push_back(key_as_token);
  EXPECT_NE(HashGrain({}, Tokens{9}, Keys{key}), HashGrain({}, tokens, {}));
}

// behaviour: D4
TEST(GrainChain, OneChangedTokenChangesAllLaterDigestsAndNoEarlierOne) {
  Tokens tokens(12);
  std::iota(tokens.begin(), tokens.end(), 0);
  GrainChain before(4, {});
  before.ExtendTo(tokens, 3);
  tokens[5] = 99;
  GrainChain after(4, {});
  after.ExtendTo(tokens, 3);
  EXPECT_EQ(before.digests()[0], after.digests()[0]);
  EXPECT_NE(before.digests()[1], after.digests()[1]);
  EXPECT_NE(before.digests()[2], after.digests()[2]);
}

// behaviour: D4
TEST(GrainChain, ContinuingEqualsHashingAtOnce) {
  Tokens tokens(40);
  std::iota(tokens.begin(), tokens.end(), 3);
  GrainChain at_once(4, {"adapter"});
  at_once.ExtendTo(tokens, 10);
  GrainChain in_steps(4, {"adapter"});
  for (const std::int32_t num_grains : {1, 1, 4, 3, 10}) {
    in_steps.ExtendTo(tokens, num_grains);
  }
  EXPECT_TRUE(std::ranges::equal(at_once.digests(), in_steps.digests()));
}

// behaviour: D5
TEST(GrainChain, NeverHashesAGrainAgain) {
  Tokens tokens = {1, 2, 3, 4};
  GrainChain chain(2, {});
  chain.ExtendTo(tokens, 2);
  const Digest first = chain.digests()[0];
  tokens[0] = 77;  // would show if the grain were read again
  chain.ExtendTo(tokens, 2);
  EXPECT_EQ(chain.digests()[0], first);
}

// behaviour: D6
TEST(PrefixHasher, ADigestIsItsRawBytes) {
  static_assert(std::is_same_v<Digest, std::array<std::uint8_t, 32>> && sizeof(Digest) == 32);
  EXPECT_EQ(HexOf(HashGrain({}, {}, {})).size(), 64u) << "text is made at the edge";
}

// behaviour: D4
TEST(GrainChain, HashesFullGrainsOnly) {
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 7};
  GrainChain chain(4, {});
  chain.ExtendTo(tokens, 1);
  ASSERT_EQ(chain.digests().size(), 1u);
  EXPECT_EQ(chain.digests()[0], HashGrain({}, std::span(tokens).first(4), {}));
}

}  // namespace
}  // namespace pdmesh
