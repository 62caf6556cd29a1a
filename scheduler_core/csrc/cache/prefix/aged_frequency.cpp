#include "cache/prefix/aged_frequency.h"

#include <algorithm>
#include <cstring>

namespace pdmesh {

std::uint8_t PromptUses::UsesOf(std::int64_t grain) const {
  std::uint8_t uses = 0;
  for (const std::int64_t num_grains_with_more : num_grains_with) {
    uses += grain < num_grains_with_more ? 1 : 0;
  }
  return uses;
}

BlockUse PromptUses::UseOf(std::int64_t grain) const {
  const std::uint8_t uses = UsesOf(grain);
  return {.value = level + 1 + kValuePerUse * uses, .uses = uses, .is_remembered = grain == num_grains - 1};
}

PromptUses AgedFrequency::UsesFor(std::span<const Digest> digests,
                                  std::span<const std::uint8_t> cached_uses) const {
  PromptUses prompt{
      .level = level_, .num_grains = static_cast<std::int64_t>(digests.size()), .num_grains_with = {}};
  std::uint8_t most = 0;
  for (std::size_t grain = digests.size(); grain-- > 0 && most < kMaxUses;) {
    std::uint8_t uses = 0;
    if (grain < cached_uses.size()) {
      uses = static_cast<std::uint8_t>(cached_uses[grain] + 1);
    } else if (const auto ghost = ghosts_.find(digests[grain]); ghost != ghosts_.end()) {
      uses = static_cast<std::uint8_t>(ghost->second.uses + 1);
    }
    for (const std::uint8_t end = std::min(uses, kMaxUses); most < end; ++most) {
      prompt.num_grains_with[most] = static_cast<std::int64_t>(grain) + 1;
    }
  }
  return prompt;
}

void AgedFrequency::RaiseLevel(const BlockUse& victim) {
  level_ = std::max(level_, victim.value);
}

void AgedFrequency::RememberEnd(const Digest& digest, std::int64_t grain, const BlockUse& victim) {
  if (!victim.is_remembered && grain % kGhostStrideGrains != kGhostStrideGrains - 1) {
    return;
  }
  const auto [ghost, is_new] = ghosts_.try_emplace(digest, Ghost{.uses = victim.uses, .number = 0});
  if (!is_new) {  // another group has left it
    ghost->second.uses = std::max(ghost->second.uses, victim.uses);
    return;
  }
  ghost->second.number = ++num_remembered_;
  line_.emplace_back(digest, num_remembered_);
  while (static_cast<std::int64_t>(line_.size()) > max_ghosts_) {
    const auto& [oldest, number] = line_.front();
    if (const auto found = ghosts_.find(oldest); found != ghosts_.end() && found->second.number == number) {
      ghosts_.erase(found);
    }
    line_.pop_front();
  }
}

void AgedFrequency::Clear() {
  ghosts_.clear();
  line_.clear();
}

std::size_t AgedFrequency::DigestHash::operator()(const Digest& digest) const noexcept {
  std::uint64_t head;  // a digest is uniform already
  std::memcpy(&head, digest.data(), sizeof head);
  return static_cast<std::size_t>(head);
}

}  // namespace pdmesh
