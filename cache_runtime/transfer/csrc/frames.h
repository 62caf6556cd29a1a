// What two nodes say to each other over a receiver-fenced data plane, after the greeting.
//
// The writer sends batches: a header, one entry per piece and, where memory is not shared, the pieces' bytes
// in the same order. The receiver answers each batch, in order, with a completion. Numbers are little-endian;
// nothing that arrives is trusted.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace pdmesh::transfer {

static_assert(std::endian::native == std::endian::little, "frames are sent as they lie in memory");

inline constexpr std::size_t kKeyBytes = 16;
using Key = std::array<std::uint8_t, kKeyBytes>;

inline constexpr std::uint32_t kBatchMagic = 0x62646d70;
inline constexpr std::uint32_t kCompletionMagic = 0x63646d70;

// Bounds on what one frame may make the other side allocate, read or throw away.
inline constexpr std::uint32_t kMaxBatchPieces = 1024;
inline constexpr std::uint64_t kMaxPieceBytes = 8ull << 20;
// Sums of addresses and lengths below it cannot wrap.
inline constexpr std::uint64_t kMaxAddress = 1ull << 62;

// A contiguous part of a run. The source is an address of the writer, the target one of the receiver.
struct Piece {
  std::uint64_t source;
  std::uint64_t target;
  std::uint64_t num_bytes;
};
static_assert(sizeof(Piece) == 24);

struct BatchHeader {
  std::uint32_t magic;
  std::uint32_t num_pieces;
  std::uint64_t batch;  // counts from 0 on each connection
  Key key;              // names the grant that must hold every target
};
static_assert(sizeof(BatchHeader) == 32);

struct Completion {
  std::uint32_t magic;
  std::uint32_t num_refused;
  std::uint64_t batch;
  std::uint32_t first_refused;  // index in the batch; meaningful when num_refused > 0
  std::uint32_t num_pieces;
};
static_assert(sizeof(Completion) == 24);

}  // namespace pdmesh::transfer
