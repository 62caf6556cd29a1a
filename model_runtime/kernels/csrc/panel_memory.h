// Where packed weights lie: beside one another on huge pages.
//
// A product reads its weight once from end to end; on pages of 4 KiB the search for their addresses takes a
// part of the time. Few weights fill huge pages of their own, so those of one model share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pdmesh::kernels {

// For one thread at a time. What was handed out outlives it.
class PanelMemory {
 public:
  // On a cache line, not initialised. Throws std::bad_alloc.
  std::shared_ptr<std::byte> allocate(std::int64_t num_bytes);

 private:
  std::shared_ptr<std::byte> chunk_;
  std::size_t chunk_bytes_ = 0;
  std::size_t used_bytes_ = 0;
};

}  // namespace pdmesh::kernels
