#include "scheduler/prefix_keys.h"

#include <algorithm>
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

PrefixKeys::PrefixKeys(CacheCoordinator& coordinator, std::int32_t prefix_granularity)
    : coordinator_(coordinator),
      prefix_granularity_(prefix_granularity),
      num_lookback_grains_(coordinator.num_lookback_grains()) {
  coordinator.AddResidencyObserver(this);
}

void PrefixKeys::OnPublished(const CacheKey& key, std::int64_t depth_tokens) {
  NoteTouched(key.digest);
  const bool is_last = !undescribed_.empty() && undescribed_.back().digest == key.digest;
  if (num_lookback_grains_ > 0 && !is_last && !parent_of_.contains(key.digest)) {
    const auto grain = static_cast<std::int32_t>((depth_tokens - 1) / prefix_granularity_);
    undescribed_.push_back({.digest = key.digest, .grain = grain});
  }
}

void PrefixKeys::OnEvicted(const CacheKey& key) {
  NoteTouched(key.digest);
}

void PrefixKeys::NoteTouched(const Digest& digest) {
  if (touched_set_.insert(digest).second) {
    touched_.push_back(digest);
  }
}

void PrefixKeys::Describe(std::span<const Digest> digests) {
  std::erase_if(undescribed_, [&](const Published& one) {
    const auto position = static_cast<std::size_t>(one.grain);
    if (position >= digests.size() || digests[position] != one.digest) {
      return false;
    }
    Link(one.digest, position == 0 ? std::nullopt : std::optional(digests[position - 1]));
    NoteTouched(one.digest);
    return true;
  });
}

void PrefixKeys::OnCleared() {
  touched_.clear();
  touched_set_.clear();
  announced_.clear();
  undescribed_.clear();
  parent_of_.clear();
  children_of_.clear();
  is_cleared_ = true;
}

PrefixKeyChanges PrefixKeys::Drain() {
  PrefixKeyChanges changes{.is_cleared = std::exchange(is_cleared_, false), .removed = {}, .stored = {}};
  const std::vector<Digest> touched = std::exchange(touched_, {});
  touched_set_.clear();
  for (const Digest& digest : WithThoseBehind(touched)) {
    if (IsResident(digest)) {
      if (announced_.insert(digest).second) {
        changes.stored.push_back(PrefixKeyOf(digest));
      }
    } else if (announced_.erase(digest) > 0) {
      changes.removed.push_back(PrefixKeyOf(digest));
    }
  }
  for (const Digest& digest : touched) {
    if (num_lookback_grains_ > 0 && !coordinator_.HasBlockOf(digest)) {
      Unlink(digest);
    }
  }
  std::erase_if(undescribed_, [&](const Published& one) { return !coordinator_.HasBlockOf(one.digest); });
  return changes;
}

bool PrefixKeys::IsResident(const Digest& digest) const {
  if (num_lookback_grains_ == 0) {
    return coordinator_.IsResident(digest);
  }
  if (!coordinator_.IsResident(digest)) {
    return false;
  }
  std::vector<Digest> tail{digest};
  while (std::ssize(tail) <= num_lookback_grains_) {
    const auto found = parent_of_.find(tail.back());
    if (found == parent_of_.end()) {
      return false;  // nothing of it is cached, or nobody has told what it follows
    }
    if (!found->second) {
      break;
    }
    tail.push_back(*found->second);
  }
  std::reverse(tail.begin(), tail.end());
  return coordinator_.IsResident(tail);
}

// A grain follows another one for good, since its digest says so.
void PrefixKeys::Link(const Digest& digest, const std::optional<Digest>& parent) {
  if (parent_of_.emplace(digest, parent).second && parent) {
    children_of_[*parent].insert(digest);
  }
}

void PrefixKeys::Unlink(const Digest& digest) {
  const auto found = parent_of_.find(digest);
  if (found == parent_of_.end()) {
    return;
  }
  if (found->second) {
    const auto siblings = children_of_.find(*found->second);
    siblings->second.erase(digest);
    if (siblings->second.empty()) {
      children_of_.erase(siblings);
    }
  }
  parent_of_.erase(found);
}

// These, then those whose windows may reach them, the nearest first.
std::vector<Digest> PrefixKeys::WithThoseBehind(std::vector<Digest> digests) const {
  if (num_lookback_grains_ == 0) {
    return digests;
  }
  DigestSet seen(digests.begin(), digests.end());
  std::size_t begin = 0;
  for (std::int64_t distance = 1; distance <= num_lookback_grains_; ++distance) {
    const std::size_t end = digests.size();
    for (std::size_t i = begin; i < end; ++i) {
      const auto found = children_of_.find(digests[i]);
      if (found == children_of_.end()) {
        continue;
      }
      for (const Digest& child : found->second) {
        if (seen.insert(child).second) {
          digests.push_back(child);
        }
      }
    }
    begin = end;
  }
  return digests;
}

}  // namespace pdmesh
