#include "cache/tier/storage_shadow.h"

#include <vector>

namespace pdmesh {

void StorageShadow::KeyLine::MoveToBack(const CacheKey& key) {
  const auto found = places_.find(key);
  if (found != places_.end()) {
    line_.splice(line_.end(), line_, found->second);
  } else {
    places_.emplace(key, line_.insert(line_.end(), key));
  }
}

void StorageShadow::KeyLine::Remove(const CacheKey& key) {
  const auto found = places_.find(key);
  if (found != places_.end()) {
    line_.erase(found->second);
    places_.erase(found);
  }
}

void StorageShadow::KeyLine::ShrinkTo(std::int64_t max_keys) {
  while (size() > max_keys) {
    places_.erase(line_.front());
    line_.pop_front();
  }
}

void StorageShadow::KeyLine::Clear() {
  places_.clear();
  line_.clear();
}

// Rear first, so that of one prefix the rear is the older part.
void StorageShadow::Register(std::span<const CacheKey> keys) {
  std::vector<const CacheKey*> front;
  for (const CacheKey& key : keys) {
    if (static_cast<std::int64_t>(front.size()) == max_keys_) {
      break;
    }
    if (!unreadable_.Contains(key)) {
      front.push_back(&key);
    }
  }
  for (auto key = front.rbegin(); key != front.rend(); ++key) {
    known_.MoveToBack(**key);
  }
  known_.ShrinkTo(max_keys_);
  num_registrations_ += front.empty() ? 0 : 1;
}

void StorageShadow::RegisterWritten(std::span<const CacheKey> keys, std::span<const CacheKey> created) {
  for (const CacheKey& key : created) {
    unreadable_.Remove(key);
  }
  Register(keys);
}

void StorageShadow::Unregister(std::span<const CacheKey> keys) {
  for (const CacheKey& key : keys) {
    known_.Remove(key);
  }
}

void StorageShadow::MarkUnreadable(const CacheKey& key) {
  known_.Remove(key);
  unreadable_.MoveToBack(key);
  unreadable_.ShrinkTo(max_keys_);
}

void StorageShadow::Clear() {
  known_.Clear();
  unreadable_.Clear();
}

}  // namespace pdmesh
