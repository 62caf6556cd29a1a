#include "support/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {
namespace {

std::vector<std::uint8_t> BytesOf(const std::string& text) {
  return {text.begin(), text.end()};
}

// Source: FIPS 180-4 examples.
TEST(Sha256, HashesTheStandardExamples) {
  EXPECT_EQ(HexOf(Sha256Of({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HexOf(Sha256Of(BytesOf("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HexOf(Sha256Of(BytesOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HexOf(Sha256Of(std::vector<std::uint8_t>(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, APaddedMessageIsWholeBlocksAndHashesLikeTheMessage) {
  for (std::size_t length = 0; length < 200; ++length) {
    std::vector<std::uint8_t> message(length, static_cast<std::uint8_t>(length));
    const Digest expected = Sha256Of(message);
    PadForSha256(message);
    EXPECT_EQ(message.size() % 64, 0u);
    EXPECT_GE(message.size(), length + 9);
    EXPECT_LT(message.size(), length + 9 + 64);
    EXPECT_EQ(Sha256OfPadded(message), expected) << length;
  }
}

TEST(Sha256, BothCompressionsAgree) {
  if (!CpuHasSha256Instructions()) {
    GTEST_SKIP() << "this CPU has no SHA instructions";
  }
  std::vector<std::uint8_t> blocks(64 * 9);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    blocks[i] = static_cast<std::uint8_t>((i * i) >> 3);
  }
  std::array<std::uint32_t, 8> portable = {1, 2, 3, 4, 5, 6, 7, 0xffffffff};
  std::array<std::uint32_t, 8> accelerated = portable;
  Sha256CompressPortable(portable.data(), blocks.data(), 9);
  Sha256CompressWithInstructions(accelerated.data(), blocks.data(), 9);
  EXPECT_EQ(portable, accelerated);
}

}  // namespace
}  // namespace pdmesh
