#include "grant_table.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pdmesh::transfer {
namespace {

// In order, those that touch or overlap joined: a run may cross blocks that lie side by side.
std::vector<Span> joined(std::vector<Span> spans) {
  if (spans.empty()) throw std::invalid_argument("spans: a grant needs at least one");
  for (const Span& span : spans) {
    if (span.begin == 0 || span.begin >= span.end || span.end > kMaxAddress) {
      throw std::invalid_argument("spans: a span is empty or ends above 2**62");
    }
  }
  const auto before = [](const Span& left, const Span& right) { return left.begin < right.begin; };
  if (!std::is_sorted(spans.begin(), spans.end(), before)) std::sort(spans.begin(), spans.end(), before);
  std::vector<Span> kept{spans.front()};
  for (const Span& span : spans) {
    if (span.begin <= kept.back().end) {
      kept.back().end = std::max(kept.back().end, span.end);
    } else {
      kept.push_back(span);
    }
  }
  return kept;
}

}  // namespace

Grant::Grant(std::vector<Span> spans, std::optional<DigestKind> hashed_as) : spans_(joined(spans)) {
  if (hashed_as) digests_.emplace(std::move(spans), *hashed_as);
}

bool Grant::covers(std::uint64_t begin, std::uint64_t num_bytes) const {
  const auto after =
      std::upper_bound(spans_.begin(), spans_.end(), begin,
                       [](std::uint64_t address, const Span& span) { return address < span.begin; });
  return after != spans_.begin() && begin + num_bytes <= std::prev(after)->end;
}

void Grant::revoke() {
  is_live_ = false;
  const std::lock_guard lock(fence_);
}

void Grant::digest(DigestKind kind, std::span<const Span> blocks, std::span<std::uint64_t> digests) const {
  const DigestCore core = choose_digest_core(kind);
  if (!digests_ || digests_->kind() != kind) {
    for (std::size_t index = 0; index < blocks.size(); ++index)
      digests[index] = digest_of(core, blocks[index]);
    return;
  }
  std::vector<std::size_t> unknown;
  {
    const std::lock_guard lock(fence_);
    unknown = digests_->find(blocks, digests);
  }
  for (const std::size_t index : unknown) digests[index] = digest_of(core, blocks[index]);
}

std::uint64_t Grant::num_hashed_spans() const {
  const std::lock_guard lock(fence_);
  return digests_ ? digests_->num_hashed() : 0;
}

std::shared_ptr<Grant> GrantTable::allow(const Key& key, std::vector<Span> spans,
                                         std::optional<DigestKind> hashed_as) {
  auto grant = std::make_shared<Grant>(std::move(spans), hashed_as);
  const std::lock_guard lock(mutex_);
  if (is_closed_) throw std::runtime_error("the engine is closed");
  if (!grants_.emplace(key, grant).second) throw std::invalid_argument("key: it has a live grant already");
  return grant;
}

void GrantTable::revoke(const Key& key, const std::shared_ptr<Grant>& grant) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = grants_.find(key);
    if (found != grants_.end() && found->second == grant) grants_.erase(found);
  }
  grant->revoke();
}

std::shared_ptr<Grant> GrantTable::find(const Key& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = grants_.find(key);
  return found == grants_.end() ? nullptr : found->second;
}

void GrantTable::close() {
  std::map<Key, std::shared_ptr<Grant>> grants;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    grants.swap(grants_);
  }
  for (const auto& [key, grant] : grants) grant->revoke();
}

void GrantTable::count(std::uint64_t num_refused_pieces, std::uint64_t num_placed_bytes) {
  num_refused_pieces_ += num_refused_pieces;
  num_placed_bytes_ += num_placed_bytes;
}

}  // namespace pdmesh::transfer
