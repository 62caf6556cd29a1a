#include "scheduler/prefix_keys.h"

#include <cstring>
#include <utility>

namespace pdmesh {

std::uint64_t PrefixKeyOf(const Digest& digest) {
  std::uint64_t key = 0;
  for (int byte = 7; byte >= 0; --byte) {
    key = (key << 8) | digest[static_cast<std::size_t>(byte)];
  }
  return key;
}

std::size_t PrefixKeys::DigestHash::operator()(const Digest& digest) const noexcept {
  std::size_t head;
  std::memcpy(&head, digest.data(), sizeof head);
  return head;
}

PrefixKeys::PrefixKeys(CacheCoordinator& coordinator) : coordinator_(coordinator) {
  coordinator.AddResidencyObserver(this);
}

void PrefixKeys::OnPublished(const CacheKey& key, std::int64_t) {
  NoteTouched(key.digest);
}

void PrefixKeys::OnEvicted(const CacheKey& key) {
  NoteTouched(key.digest);
}

void PrefixKeys::NoteTouched(const Digest& digest) {
  if (touched_set_.insert(digest).second) {
    touched_.push_back(digest);
  }
}

void PrefixKeys::OnCleared() {
  touched_.clear();
  touched_set_.clear();
  announced_.clear();
  is_cleared_ = true;
}

PrefixKeyChanges PrefixKeys::Drain() {
  PrefixKeyChanges changes{.is_cleared = std::exchange(is_cleared_, false), .removed = {}, .stored = {}};
  for (const Digest& digest : std::exchange(touched_, {})) {
    if (coordinator_.IsResident(digest)) {
      if (announced_.insert(digest).second) {
        changes.stored.push_back(PrefixKeyOf(digest));
      }
    } else if (announced_.erase(digest) > 0) {
      changes.removed.push_back(PrefixKeyOf(digest));
    }
  }
  touched_set_.clear();
  return changes;
}

}  // namespace pdmesh
