// The AES-16 digest: 16 lanes of 128 bits, each of which takes one round of AES for every 16 bytes.
//
// Of `n` bytes: they are filled up with zeros to whole stripes of 256 bytes. For each stripe, lane `j`
// becomes round(lane j, bytes [16 j, 16 j + 16) of the stripe). Three more stripes follow, of what the lanes
// started as. Then a state that starts as (n, w(32)) becomes round(state, lane j) for each lane in order, and
// three times round(state, (w(33), w(34))). The digest is the exclusive or of its two halves. There
//   round(state, key) = MixColumns(ShiftRows(SubBytes(state))) xor key   (FIPS 197, sections 5.1.1 to 5.1.4),
//   w(i) = (i + 1) * 0x9e3779b97f4a7c15 modulo 2^64,
// lane j starts as (w(2 j), w(2 j + 1)), and a pair of words is 16 bytes, the first word in the first eight
// of them, little-endian.
//
// A round is a bijection of its state and of its key: damage to one unit of 16 bytes always changes the
// state, and stays hidden only where the halves happen to cancel out, one time in 2^64. The stripes at the
// end spread what came last over its lane before lanes meet. It is no defence against someone who looks for
// collisions.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "digest_core.h"

namespace pdmesh::transfer::PDMESH_VARIANT {
namespace {

constexpr std::size_t kLaneBytes = 16;
constexpr std::size_t kNumLanes = 16;
constexpr std::size_t kStripeBytes = kLaneBytes * kNumLanes;
constexpr std::size_t kNumFinalRounds = 3;
// See xxh3_digest.cpp.
constexpr std::size_t kPrefetchDistance = 4096;
constexpr std::size_t kCacheLineBytes = 64;

#if defined(__AVX512F__)
using Vector = __m512i;
Vector load(const std::byte* bytes) {
  return _mm512_loadu_si512(bytes);
}
void store(std::byte* bytes, Vector vector) {
  _mm512_storeu_si512(bytes, vector);
}
Vector round_of(Vector state, Vector key) {
  return _mm512_aesenc_epi128(state, key);
}
#elif defined(__VAES__)
using Vector = __m256i;
Vector load(const std::byte* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}
void store(std::byte* bytes, Vector vector) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), vector);
}
Vector round_of(Vector state, Vector key) {
  return _mm256_aesenc_epi128(state, key);
}
#else
using Vector = __m128i;
Vector load(const std::byte* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}
void store(std::byte* bytes, Vector vector) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), vector);
}
Vector round_of(Vector state, Vector key) {
  return _mm_aesenc_si128(state, key);
}
#endif

constexpr std::size_t kNumVectors = kStripeBytes / sizeof(Vector);

constexpr std::uint64_t word(std::uint64_t index) {
  return (index + 1) * 0x9e3779b97f4a7c15;
}

constexpr std::array<std::uint64_t, 2 * kNumLanes> first_lanes() {
  std::array<std::uint64_t, 2 * kNumLanes> words{};
  for (std::size_t index = 0; index < words.size(); ++index) words[index] = word(index);
  return words;
}

__m128i pair(std::uint64_t first, std::uint64_t second) {
  return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
}

class Digest {
 public:
  Digest() {
    constexpr std::array<std::uint64_t, 2 * kNumLanes> words = first_lanes();
    std::memcpy(lanes_, words.data(), kStripeBytes);
  }

  void update(const std::byte* bytes, std::size_t num_bytes) {
    num_bytes_ += num_bytes;
    if (num_left_bytes_ > 0) {
      const std::size_t num_taken = std::min(kStripeBytes - num_left_bytes_, num_bytes);
      std::memcpy(left_ + num_left_bytes_, bytes, num_taken);
      num_left_bytes_ += num_taken;
      bytes += num_taken;
      num_bytes -= num_taken;
      if (num_left_bytes_ < kStripeBytes) return;
      absorb(left_, 1);
    }
    absorb(bytes, num_bytes / kStripeBytes);
    num_left_bytes_ = num_bytes % kStripeBytes;
    if (num_left_bytes_ > 0) std::memcpy(left_, bytes + num_bytes - num_left_bytes_, num_left_bytes_);
  }

  std::uint64_t finish() {
    if (num_left_bytes_ > 0) {
      std::memset(left_ + num_left_bytes_, 0, kStripeBytes - num_left_bytes_);
      absorb(left_, 1);
    }
    constexpr std::array<std::uint64_t, 2 * kNumLanes> words = first_lanes();
    for (std::size_t round = 0; round < kNumFinalRounds; ++round) {
      absorb(reinterpret_cast<const std::byte*>(words.data()), 1);
    }
    __m128i state = pair(num_bytes_, word(2 * kNumLanes));
    for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
      const auto* bytes = reinterpret_cast<const __m128i*>(lanes_ + lane * kLaneBytes);
      state = _mm_aesenc_si128(state, _mm_loadu_si128(bytes));
    }
    for (std::size_t round = 0; round < kNumFinalRounds; ++round) {
      state = _mm_aesenc_si128(state, pair(word(2 * kNumLanes + 1), word(2 * kNumLanes + 2)));
    }
    const auto low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(state));
    return low ^ static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(state, state)));
  }

 private:
  void absorb(const std::byte* bytes, std::size_t num_stripes) {
    Vector lanes[kNumVectors];
    for (std::size_t index = 0; index < kNumVectors; ++index)
      lanes[index] = load(lanes_ + index * sizeof(Vector));
    for (const std::byte* end = bytes + num_stripes * kStripeBytes; bytes < end; bytes += kStripeBytes) {
      for (std::size_t line = 0; line < kStripeBytes; line += kCacheLineBytes) {
        __builtin_prefetch(bytes + kPrefetchDistance + line);
      }
#pragma GCC unroll 16
      for (std::size_t index = 0; index < kNumVectors; ++index) {
        lanes[index] = round_of(lanes[index], load(bytes + index * sizeof(Vector)));
      }
    }
    for (std::size_t index = 0; index < kNumVectors; ++index)
      store(lanes_ + index * sizeof(Vector), lanes[index]);
  }

  alignas(kCacheLineBytes) std::byte lanes_[kStripeBytes];
  alignas(kCacheLineBytes) std::byte left_[kStripeBytes];
  std::size_t num_left_bytes_ = 0;
  std::uint64_t num_bytes_ = 0;
};

void digest(std::span<const std::uint64_t> begins, std::span<const Extent> extents,
            std::span<std::uint64_t> digests) {
  for (std::size_t block = 0; block < begins.size(); ++block) {
    Digest state;
    for (const Extent& extent : extents) {
      state.update(reinterpret_cast<const std::byte*>(begins[block] + extent.offset), extent.num_bytes);
    }
    digests[block] = state.finish();
  }
}

}  // namespace

DigestCore digest_core() {
  return &digest;
}

}  // namespace pdmesh::transfer::PDMESH_VARIANT
