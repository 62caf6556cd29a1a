#include "panel_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace pdmesh::kernels {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = 16 * kHugePage;
// A huge page is cleared as a whole when it is first written: too much for what is read in no time.
constexpr std::size_t kSmall = kHugePage / 8;

std::size_t round_up(std::size_t num_bytes, std::size_t unit) {
  return (num_bytes + unit - 1) / unit * unit;
}

std::shared_ptr<std::byte> allocate_aligned(std::size_t num_bytes, std::size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, num_bytes) != 0) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* owned) { std::free(owned); }};
}

}  // namespace

std::shared_ptr<std::byte> PanelMemory::allocate(std::int64_t num_bytes) {
  const std::size_t wanted =
      round_up(std::max(static_cast<std::size_t>(num_bytes), std::size_t{1}), kCacheLine);
  if (wanted < kSmall) return allocate_aligned(wanted, kCacheLine);
  if (wanted > chunk_bytes_ - used_bytes_) {
    const std::size_t chunk_bytes = std::max(kChunk, round_up(wanted, kHugePage));
    chunk_ = allocate_aligned(chunk_bytes, kHugePage);
    chunk_bytes_ = chunk_bytes;
    used_bytes_ = 0;
#if defined(MADV_HUGEPAGE)
    madvise(chunk_.get(), chunk_bytes, MADV_HUGEPAGE);  // which a system without them refuses
#endif
  }
  std::byte* begin = chunk_.get() + used_bytes_;
  used_bytes_ += wanted;
  return {chunk_, begin};
}

}  // namespace pdmesh::kernels
