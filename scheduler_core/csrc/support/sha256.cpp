#include "support/sha256.h"

#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pdmesh {
namespace {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kLengthFieldOffset = 56;

constexpr std::array<std::uint32_t, 8> kInitialState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<std::uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using CompressFunction = void (*)(std::uint32_t*, const std::uint8_t*, std::size_t);

std::uint32_t LoadBigEndian(const std::uint8_t* bytes) {
  return (std::uint32_t{bytes[0]} << 24) | (std::uint32_t{bytes[1]} << 16) | (std::uint32_t{bytes[2]} << 8) |
         std::uint32_t{bytes[3]};
}

void StoreBigEndian(std::uint8_t* bytes, std::uint32_t word) {
  bytes[0] = static_cast<std::uint8_t>(word >> 24);
  bytes[1] = static_cast<std::uint8_t>(word >> 16);
  bytes[2] = static_cast<std::uint8_t>(word >> 8);
  bytes[3] = static_cast<std::uint8_t>(word);
}

CompressFunction Compress() {
  static const CompressFunction chosen =
      CpuHasSha256Instructions() ? &Sha256CompressWithInstructions : &Sha256CompressPortable;
  return chosen;
}

}  // namespace

void Sha256CompressPortable(std::uint32_t* state, const std::uint8_t* blocks, std::size_t num_blocks) {
  std::array<std::uint32_t, 64> w;
  for (; num_blocks > 0; --num_blocks, blocks += kBlockBytes) {
    for (std::size_t t = 0; t < 16; ++t) {
      w[t] = LoadBigEndian(blocks + 4 * t);
    }
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = std::to_array<std::uint32_t>(
        {state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]});
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRoundConstants[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> working = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) {
      state[i] += working[i];
    }
  }
}

#if defined(__x86_64__)

bool CpuHasSha256Instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
    return false;
  }
  const bool has_ssse3_and_sse41 = (ecx & bit_SSSE3) != 0 && (ecx & bit_SSE4_1) != 0;
  if (!has_ssse3_and_sse41 || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
    return false;
  }
  return (ebx & bit_SHA) != 0;
}

// The instruction keeps the eight working words in two registers, high lane first: A B E F and C D G H. Two
// rounds turn (ABEF, CDGH) into (new ABEF, old ABEF), so the two registers swap roles with every instruction.
__attribute__((target("sha,sse4.1,ssse3"))) void Sha256CompressWithInstructions(std::uint32_t* state,
                                                                                const std::uint8_t* blocks,
                                                                                std::size_t num_blocks) {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const auto word = [state](int i) { return static_cast<int>(state[i]); };
  __m128i abef = _mm_set_epi32(word(0), word(1), word(4), word(5));
  __m128i cdgh = _mm_set_epi32(word(2), word(3), word(6), word(7));
  for (; num_blocks > 0; --num_blocks, blocks += kBlockBytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int quad = 0; quad < 16; ++quad) {
      const int now = quad % 4;
      const int last = (quad + 3) % 4;
      if (quad < 4) {
        w[now] =
            _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks) + quad), to_big_endian);
      } else {
        const __m128i seven_back = _mm_alignr_epi8(w[last], w[(quad + 2) % 4], 4);
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(w[now], w[(quad + 1) % 4]), seven_back);
        w[now] = _mm_sha256msg2_epu32(partial, w[last]);
      }
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants.data()) + quad);
      const __m128i wk = _mm_add_epi32(w[now], k);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  state[0] = static_cast<std::uint32_t>(_mm_extract_epi32(abef, 3));
  state[1] = static_cast<std::uint32_t>(_mm_extract_epi32(abef, 2));
  state[2] = static_cast<std::uint32_t>(_mm_extract_epi32(cdgh, 3));
  state[3] = static_cast<std::uint32_t>(_mm_extract_epi32(cdgh, 2));
  state[4] = static_cast<std::uint32_t>(_mm_extract_epi32(abef, 1));
  state[5] = static_cast<std::uint32_t>(_mm_extract_epi32(abef, 0));
  state[6] = static_cast<std::uint32_t>(_mm_extract_epi32(cdgh, 1));
  state[7] = static_cast<std::uint32_t>(_mm_extract_epi32(cdgh, 0));
}

#else

bool CpuHasSha256Instructions() {
  return false;
}

void Sha256CompressWithInstructions(std::uint32_t* state, const std::uint8_t* blocks,
                                    std::size_t num_blocks) {
  Sha256CompressPortable(state, blocks, num_blocks);
}

#endif

Digest Sha256Of(std::span<const std::uint8_t> message) {
  std::vector<std::uint8_t> padded(message.begin(), message.end());
  PadForSha256(padded);
  return Sha256OfPadded(padded);
}

void PadForSha256(std::vector<std::uint8_t>& message) {
  const std::uint64_t num_bits = std::uint64_t{message.size()} * 8;
  message.push_back(0x80);
  while (message.size() % kBlockBytes != kLengthFieldOffset) {
    message.push_back(0);
  }
  message.resize(message.size() + 8);
  StoreBigEndian(message.data() + message.size() - 8, static_cast<std::uint32_t>(num_bits >> 32));
  StoreBigEndian(message.data() + message.size() - 4, static_cast<std::uint32_t>(num_bits));
}

Digest Sha256OfPadded(std::span<const std::uint8_t> message) {
  std::array<std::uint32_t, 8> state = kInitialState;
  Compress()(state.data(), message.data(), message.size() / kBlockBytes);
  Digest digest;
  for (std::size_t i = 0; i < state.size(); ++i) {
    StoreBigEndian(digest.data() + 4 * i, state[i]);
  }
  return digest;
}

}  // namespace pdmesh
