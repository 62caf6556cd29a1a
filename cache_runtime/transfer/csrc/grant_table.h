// The receiver's fence: which memory may be written to right now, by grant key.
//
// Knows addresses and keys, no sockets and no handoffs. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "arrival_digests.h"
#include "frames.h"
#include "span.h"

namespace pdmesh::transfer {

// Memory granted under one key. Its spans never change; it is live until it is revoked, once.
class Grant {
 public:
  // With `hashed_as` each span is hashed as it arrives.
  explicit Grant(std::vector<Span> spans, std::optional<DigestKind> hashed_as = std::nullopt);

  bool covers(std::uint64_t begin, std::uint64_t num_bytes) const;

  // Runs `place` unless the grant was revoked; returns whether it ran. `revoke` waits for it, so it must be
  // short and must not wait for a peer.
  template <class Place>
  bool place(const Place& place) {
    // A look before the lock, or a placing thread could win it over and over from one that revokes.
    if (!is_live_) return false;
    const std::lock_guard lock(fence_);
    if (!is_live_) return false;
    place();
    return true;
  }

  bool hashes() const { return digests_.has_value(); }

  // Inside `place`: bytes [begin, begin + num_bytes) were placed.
  void note_placed(std::uint64_t begin, std::uint64_t num_bytes) {
    if (digests_) digests_->note_placed(begin, num_bytes);
  }

  // After it returned nothing is placed any more.
  void revoke();

  // Into `digests`, one for each of `blocks`, what these hold now; also after `revoke`.
  void digest(DigestKind kind, std::span<const Span> blocks, std::span<std::uint64_t> digests) const;

  // Spans that were hashed as they arrived.
  std::uint64_t num_hashed_spans() const;

 private:
  std::vector<Span> spans_;  // in order, with gaps between them
  std::optional<ArrivalDigests> digests_;
  std::atomic<bool> is_live_{true};
  mutable std::mutex fence_;
};

class GrantTable {
 public:
  // See Grant. Throws std::invalid_argument when the key is live already, a span is empty or none is given,
  // and std::runtime_error after `close`.
  std::shared_ptr<Grant> allow(const Key& key, std::vector<Span> spans,
                               std::optional<DigestKind> hashed_as = std::nullopt);

  // Idempotent; see Grant::revoke.
  void revoke(const Key& key, const std::shared_ptr<Grant>& grant);

  // The live grant of that key, null when there is none.
  std::shared_ptr<Grant> find(const Key& key) const;

  // Revokes everything and grants nothing more.
  void close();

  void count(std::uint64_t num_refused_pieces, std::uint64_t num_placed_bytes);
  std::uint64_t num_refused_pieces() const { return num_refused_pieces_; }
  std::uint64_t num_placed_bytes() const { return num_placed_bytes_; }

 private:
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Grant>> grants_;
  bool is_closed_ = false;
  std::atomic<std::uint64_t> num_refused_pieces_{0};
  std::atomic<std::uint64_t> num_placed_bytes_{0};
};

}  // namespace pdmesh::transfer
