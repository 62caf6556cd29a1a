#include "scheduler/prefix_events.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/errors.h"

namespace pdmesh {
namespace {

class Fnv1a {
 public:
  // The lowest `num_bytes` bytes of a number, lowest first.
  void Add(std::uint64_t number, int num_bytes) {
    for (int byte = 0; byte < num_bytes; ++byte) {
      hash_ = (hash_ ^ ((number >> (8 * byte)) & 0xff)) * 0x100000001b3ULL;
    }
  }

  std::uint64_t hash() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

// Whether it is the grain of that position among a prompt's `digests`.
bool IsAmong(const Digest& digest, std::int32_t grain, std::span<const Digest> digests) {
  const auto position = static_cast<std::size_t>(grain);
  return position < digests.size() && digests[position] == digest;
}

}  // namespace

std::uint64_t HashForEvent(std::optional<std::uint64_t> parent_hash, std::span<const std::int32_t> tokens) {
  Fnv1a fnv;
  fnv.Add(parent_hash ? 1 : 0, 1);
  if (parent_hash) {
    fnv.Add(*parent_hash, 8);
  }
  fnv.Add(tokens.size(), 8);
  for (const std::int32_t token : tokens) {
    fnv.Add(static_cast<std::uint32_t>(token), 4);
  }
  return fnv.hash();
}

std::size_t PrefixEvents::DigestHash::operator()(const Digest& digest) const noexcept {
  std::size_t head;
  std::memcpy(&head, digest.data(), sizeof head);
  return head;
}

PrefixEvents::PrefixEvents(CacheCoordinator& coordinator, std::int32_t prefix_granularity)
    : coordinator_(coordinator), prefix_granularity_(prefix_granularity) {
  coordinator_.AddResidencyObserver(this);
}

void PrefixEvents::OnPublished(const CacheKey& key, std::int64_t depth_tokens) {
  if (published_.empty() || published_.back().digest != key.digest) {
    const auto grain = static_cast<std::int32_t>((depth_tokens - 1) / prefix_granularity_);
    published_.push_back({.digest = key.digest, .grain = grain});
  }
}

void PrefixEvents::OnEvicted(const CacheKey& key) {
  const auto known = hash_of_.find(key.digest);
  if (known == hash_of_.end() || coordinator_.IsResident(key.digest)) {
    return;
  }
  const std::uint64_t hash = known->second;
  hash_of_.erase(known);
  Grain& grain = grains_.at(hash);
  std::erase(grain.digests, key.digest);
  NoteChange(hash, grain);
}

void PrefixEvents::Describe(std::span<const std::int32_t> tokens, std::vector<std::uint64_t>& hashes) {
  for (const Published& published : std::exchange(published_, {})) {
    if (hash_of_.contains(published.digest) || !coordinator_.IsResident(published.digest)) {
      continue;
    }
    const auto grain_tokens = static_cast<std::size_t>(prefix_granularity_);
    while (hashes.size() <= static_cast<std::size_t>(published.grain)) {
      const std::optional<std::uint64_t> parent =
          hashes.empty() ? std::nullopt : std::optional(hashes.back());
      hashes.push_back(HashForEvent(parent, tokens.subspan(hashes.size() * grain_tokens, grain_tokens)));
    }
    Enter(published, tokens, hashes);
  }
}

void PrefixEvents::DescribeOnly(std::span<const Digest> digests, std::span<const std::int32_t> tokens,
                                std::vector<std::uint64_t>& hashes) {
  const auto others = std::stable_partition(published_.begin(), published_.end(), [&](const Published& one) {
    return IsAmong(one.digest, one.grain, digests);
  });
  std::vector<Published> left(others, published_.end());
  published_.erase(others, published_.end());
  Describe(tokens, hashes);
  published_ = std::move(left);
}

void PrefixEvents::LeaveOut() {
  published_.clear();
}

void PrefixEvents::LeaveOutOnly(std::span<const Digest> digests) {
  std::erase_if(published_, [&](const Published& one) { return IsAmong(one.digest, one.grain, digests); });
}

// A digest became resident.
void PrefixEvents::Enter(const Published& published, std::span<const std::int32_t> tokens,
                         const std::vector<std::uint64_t>& hashes) {
  const auto position = static_cast<std::size_t>(published.grain);
  const std::uint64_t hash = hashes[position];
  const auto [found, is_new] = grains_.try_emplace(hash);
  Grain& grain = found->second;
  if (is_new) {
    const auto grain_tokens = static_cast<std::size_t>(prefix_granularity_);
    const auto own = tokens.subspan(position * grain_tokens, grain_tokens);
    grain.parent_hash = position == 0 ? std::nullopt : std::optional(hashes[position - 1]);
    grain.position = published.grain;
    grain.arrival = num_arrivals_++;
    grain.tokens.assign(own.begin(), own.end());
  }
  grain.digests.push_back(published.digest);
  hash_of_.emplace(published.digest, hash);
  NoteChange(hash, grain);
}

// The grain may have become resident or ceased to be. Forgets it if that leaves nothing to say or to take
// back.
void PrefixEvents::NoteChange(std::uint64_t hash, Grain& grain) {
  const Place place{grain.position, grain.arrival};
  if (grain.is_resident() != grain.is_announced) {
    changed_.emplace(place, hash);
    return;
  }
  changed_.erase(place);
  if (!grain.is_resident()) {
    grains_.erase(hash);
  }
}

void PrefixEvents::OnCleared() {
  Ensure(published_.empty() && hash_of_.empty(), "prefixes are resident in a cleared cache");
  grains_.clear();
  changed_.clear();
  is_cleared_ = true;
}

std::vector<PrefixEvent> PrefixEvents::Drain() {
  Ensure(published_.empty(), "a prefix was published that nobody described");
  std::vector<PrefixEvent> events;
  if (std::exchange(is_cleared_, false)) {
    events.emplace_back(PrefixCleared());
  }
  const auto changed = std::exchange(changed_, {});
  for (auto last = changed.rbegin(); last != changed.rend(); ++last) {
    if (!grains_.at(last->second).is_resident()) {
      events.emplace_back(PrefixRemoved{.hash = last->second});
      grains_.erase(last->second);
    }
  }
  for (const auto& [place, hash] : changed) {
    const auto found = grains_.find(hash);
    if (found == grains_.end()) {
      continue;
    }
    Grain& grain = found->second;
    grain.is_announced = true;
    events.emplace_back(PrefixStored{.hash = hash,
                                     .parent_hash = grain.parent_hash,
                                     .tokens = std::exchange(grain.tokens, {}),
                                     .prefix_granularity = prefix_granularity_});
  }
  return events;
}

}  // namespace pdmesh
