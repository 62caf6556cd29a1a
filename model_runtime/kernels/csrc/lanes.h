// One vector register of floats, for code that is compiled once per instruction set.
//
// Only for the *_core.cpp files: everything is in an unnamed namespace, because a function of one instruction
// set must never stand in for its twin of another when the linker merges equal names.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#if PDMESH_LANES > 4
#include <immintrin.h>
#endif

namespace pdmesh::kernels {
namespace {

constexpr int kLanes = PDMESH_LANES;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int IntVec __attribute__((vector_size(4 * kLanes)));
typedef int UnalignedIntVec __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
typedef signed char ByteVec __attribute__((vector_size(kLanes)));
typedef unsigned short HalfVec __attribute__((vector_size(2 * kLanes)));

inline Vec load(const float* from) {
  return *reinterpret_cast<const UnalignedVec*>(from);
}
inline void store(float* to, Vec value) {
  *reinterpret_cast<UnalignedVec*>(to) = value;
}
inline Vec broadcast(float value) {
  return value - Vec{};
}

// ---- integers that become floats; exact, from any address ----

inline IntVec load_ints(const std::byte* from) {
  return *reinterpret_cast<const UnalignedIntVec*>(from);
}

// Signed bytes. Written for the instruction set where the compiler would take the vector apart.
inline Vec load_bytes(const std::byte* from) {
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
#if PDMESH_LANES == 16
  const IntVec wide = reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(bytes)));
#elif PDMESH_LANES == 8
  const IntVec wide =
      reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(reinterpret_cast<long long>(bytes))));
#else
  const IntVec wide = __builtin_convertvector(bytes, IntVec);
#endif
  return __builtin_convertvector(wide, Vec);
}

// Finite float16 bit patterns. Source: IEEE 754 binary16; read as the top of a float32 the exponent is too
// small by the difference of the biases, 112.
inline Vec load_halves(const std::byte* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof(halves));
#if PDMESH_LANES == 16
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(halves)));
#elif PDMESH_LANES == 8
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
#else
  const IntVec bits = __builtin_convertvector(halves, IntVec);
  const Vec magnitude = reinterpret_cast<Vec>((bits & 0x7FFF) << 13) * 0x1p112F;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(magnitude) | (bits & 0x8000) << 16);
#endif
}

// The lowest four bits of every lane, unsigned.
inline Vec nibble_to_float(IntVec words) {
#if PDMESH_LANES == 16
  constexpr Vec kValues = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(kValues, words);  // which looks at no other bits of the index
#else
  return __builtin_convertvector(words & 15, Vec);
#endif
}

struct HalfLow {
  static constexpr int at(int i) { return i < kLanes / 2 ? i : kLanes / 2 + i; }
};
struct HalfHigh {
  static constexpr int at(int i) { return HalfLow::at(i) + kLanes / 2; }
};
struct QuarterEven {
  static constexpr int at(int i) { return (i / (kLanes / 2)) * kLanes + (i / 4 % 2) * 8 + i % 4; }
};
struct QuarterOdd {
  static constexpr int at(int i) { return QuarterEven::at(i) + 4; }
};
struct PairLow {
  static constexpr int at(int i) { return i % 4 < 2 ? i : kLanes + i - 2; }
};
struct PairHigh {
  static constexpr int at(int i) { return PairLow::at(i) + 2; }
};
struct Even {
  static constexpr int at(int i) { return i / 4 * 4 + (i % 4 < 2 ? 2 * (i % 4) : kLanes + 2 * (i % 4 - 2)); }
};
struct Odd {
  static constexpr int at(int i) { return Even::at(i) + 1; }
};

template <class Pick, std::size_t... I>
inline Vec pick(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, Pick::at(static_cast<int>(I))...);
}

// Adds lanes of a pairwise into one half of the result and those of b into the other.
template <class First, class Second>
inline Vec fold(Vec a, Vec b) {
  constexpr auto lanes = std::make_index_sequence<static_cast<std::size_t>(kLanes)>{};
  return pick<First>(a, b, lanes) + pick<Second>(a, b, lanes);
}

// Lane 4 * q + r of the result is the sum over the lanes of v[4 * q + r]; always by the same tree.
inline Vec sum_lanes(const Vec (&v)[kLanes]) {
  Vec quarter[4];
  for (int r = 0; r < 4; ++r) {
    if constexpr (kLanes == 16) {
      quarter[r] = fold<QuarterEven, QuarterOdd>(fold<HalfLow, HalfHigh>(v[r], v[4 + r]),
                                                 fold<HalfLow, HalfHigh>(v[8 + r], v[12 + r]));
    } else if constexpr (kLanes == 8) {
      quarter[r] = fold<HalfLow, HalfHigh>(v[r], v[4 + r]);
    } else {
      quarter[r] = v[r];
    }
  }
  return fold<Even, Odd>(fold<PairLow, PairHigh>(quarter[0], quarter[1]),
                         fold<PairLow, PairHigh>(quarter[2], quarter[3]));
}

// exp(x) for x <= 0, exactly 1 at 0 and 0 below the smallest normal result; relative error below 2e-7.
// Source: Cody and Waite 1980, argument reduction by a two-part ln 2, then the Taylor polynomial of degree 7.
inline Vec exp_nonpositive(Vec x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const Vec lowest = broadcast(-87.3F);
  const IntVec underflows = x < lowest;
  const Vec clamped = underflows ? lowest : x;
  const Vec shifted = clamped * 1.44269504F + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  Vec p = r * (1.0F / 5040.0F) + (1.0F / 720.0F);
  p = p * r + (1.0F / 120.0F);
  p = p * r + (1.0F / 24.0F);
  p = p * r + (1.0F / 6.0F);
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) << 23;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + exponent);
  return underflows ? Vec{} : result;
}

inline float exp_nonpositive(float x) {
  return exp_nonpositive(broadcast(x))[0];
}

}  // namespace
}  // namespace pdmesh::kernels
