// StorageShadow: which keys the storage behind the host tier is known to have. No content, no promise: a read
// may still miss.
//
// Bounded, least recently registered keys leave first. It knows keys only; who asks storage and when is the
// runtime's business. Owned by the coordinator.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>

#include "cache/prefix/cache_key.h"

namespace pdmesh {

class StorageShadow {
 public:
  // Keeps at most `max_keys` keys, and at most as many that cannot be read.
  explicit StorageShadow(std::int64_t max_keys) : max_keys_(max_keys) {}

  bool Contains(const CacheKey& key) const { return known_.Contains(key); }
  std::int64_t num_keys() const { return known_.size(); }
  // Counts the registrations; a prefix that was looked up before can have grown only if it changed.
  std::uint64_t num_registrations() const { return num_registrations_; }
  std::int64_t num_unreadable_keys() const { return unreadable_.size(); }

  // Storage has these keys of one prefix, front first. When they are too many the front of the prefix is kept
  // without a gap, whatever of its rear was here before; other prefixes leave first. Unreadable keys stay
  // out.
  void Register(std::span<const CacheKey> keys);
  // The same for keys that were just written. `created` of them were missing before, so what storage has
  // under these is new, and an unreadable one can be read again.
  void RegisterWritten(std::span<const CacheKey> keys, std::span<const CacheKey> created);
  void Unregister(std::span<const CacheKey> keys);
  // A read of the key missed although storage said it was there.
  void MarkUnreadable(const CacheKey& key);
  void Clear();

 private:
  // Keys in the order of their last entry.
  class KeyLine {
   public:
    bool Contains(const CacheKey& key) const { return places_.contains(key); }
    std::int64_t size() const { return static_cast<std::int64_t>(places_.size()); }
    void MoveToBack(const CacheKey& key);
    void Remove(const CacheKey& key);
    void ShrinkTo(std::int64_t max_keys);  // oldest first
    void Clear();

   private:
    std::list<CacheKey> line_;
    std::unordered_map<CacheKey, std::list<CacheKey>::iterator, CacheKeyHash> places_;  // never walked
  };

  std::int64_t max_keys_;
  std::uint64_t num_registrations_ = 0;
  KeyLine known_;
  KeyLine unreadable_;
};

}  // namespace pdmesh
