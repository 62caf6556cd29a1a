// CacheBlockRef: shared ownership of one CacheBlock. The end of the last reference frees exactly that child
// slot.
//
// Owners are block tables, prefix-index entries, transfers and quarantine; nothing else keeps a block. A
// reference does not say who else holds the block.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/core/block_pool.h"

namespace pdmesh {

class CacheBlockRef {
 public:
  CacheBlockRef() = default;  // empty: owns nothing
  CacheBlockRef(const CacheBlockRef& other) noexcept
      : pool_(other.pool_), child_(other.child_), block_id_(other.block_id_) {
    if (pool_ != nullptr) {
      pool_->Retain(child_, block_id_);
    }
  }
  CacheBlockRef(CacheBlockRef&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)),
        child_(std::exchange(other.child_, 0)),
        block_id_(std::exchange(other.block_id_, kNullBlockId)) {}
  CacheBlockRef& operator=(const CacheBlockRef& other) noexcept {
    CacheBlockRef copy(other);
    swap(copy);
    return *this;
  }
  CacheBlockRef& operator=(CacheBlockRef&& other) noexcept {
    CacheBlockRef taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~CacheBlockRef() { Reset(); }

  void swap(CacheBlockRef& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(child_, other.child_);
    std::swap(block_id_, other.block_id_);
  }
  void Reset() noexcept {
    if (pool_ != nullptr) {
      std::exchange(pool_, nullptr)->Release(child_, block_id_);
      child_ = 0;
      block_id_ = kNullBlockId;
    }
  }

  explicit operator bool() const { return pool_ != nullptr; }
  // The id that tables and plans carry; kNullBlockId when empty.
  std::int32_t block_id() const { return block_id_; }

 private:
  friend class BlockPool;
  CacheBlockRef(BlockPool* pool, std::int32_t child, std::int32_t block_id) noexcept
      : pool_(pool), child_(child), block_id_(block_id) {}

  BlockPool* pool_ = nullptr;
  std::int32_t child_ = 0;
  std::int32_t block_id_ = kNullBlockId;
};

}  // namespace pdmesh
