#include "receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "socket_io.h"

namespace pdmesh::transfer {
namespace {

// How much is copied before the fence is looked at again: bounds how long a revocation waits.
constexpr std::uint64_t kMaxFencedBytes = 1ull << 20;
// The same where blocks are hashed: what was copied, and what it was copied from, must still be in the core's
// cache then.
constexpr std::uint64_t kMaxHashedStepBytes = 128ull << 10;
// What one call asks the socket for: hardly ever is more there, and every buffer that is named costs time.
constexpr std::uint64_t kMaxReceivedBytes = 256ull << 10;
constexpr std::size_t kMaxBuffers = 512;
constexpr std::size_t kWasteBytes = 1 << 18;

}  // namespace

// One batch on its way into memory.
struct Receiver::Placing {
  std::shared_ptr<Grant> grant;
  std::uint32_t num_refused = 0;
  std::uint32_t first_refused = 0;
  std::uint64_t num_placed_bytes = 0;
  // Of a batch whose bytes come in the stream: what is to be placed, and how far the stream has got.
  std::vector<bool> to_place;
  std::size_t index = 0;
  std::uint64_t num_arrived_bytes = 0;  // of the piece at `index`

  bool is_granted(const Piece& piece) const { return grant && grant->covers(piece.target, piece.num_bytes); }

  void refuse(std::size_t index) {
    if (num_refused++ == 0) first_refused = static_cast<std::uint32_t>(index);
  }
};

Receiver::Receiver(std::shared_ptr<GrantTable> grants, int descriptor, bool is_shared,
                   std::vector<SharedSource> sources)
    : grants_(std::move(grants)),
      descriptor_(descriptor),
      is_shared_(is_shared),
      sources_(std::move(sources)) {}

std::string Receiver::serve() {
  try {
    while (take_batch()) {
    }
    return "";
  } catch (const ConnectionLost& error) {
    return error.what();
  }
}

bool Receiver::take_batch() {
  BatchHeader header;
  if (!receive_all(descriptor_, &header, sizeof header)) return false;
  if (header.magic != kBatchMagic || header.batch != next_batch_)
    throw ConnectionLost("malformed frame: no batch");
  if (header.num_pieces == 0 || header.num_pieces > kMaxBatchPieces) {
    throw ConnectionLost("malformed frame: " + std::to_string(header.num_pieces) + " pieces, 1 to " +
                         std::to_string(kMaxBatchPieces) + " allowed");
  }
  ++next_batch_;
  pieces_.resize(header.num_pieces);
  if (!receive_all(descriptor_, pieces_.data(), pieces_.size() * sizeof(Piece))) {
    throw ConnectionLost("the peer closed the connection inside a frame");
  }
  check_pieces(header);
  Placing placing;
  placing.grant = grants_->find(header.key);
  is_shared_ ? copy_pieces(placing) : receive_pieces(placing);
  grants_->count(placing.num_refused, placing.num_placed_bytes);
  const Completion completion{kCompletionMagic, placing.num_refused, header.batch, placing.first_refused,
                              header.num_pieces};
  send_all(descriptor_, &completion, sizeof completion);
  return true;
}

void Receiver::check_pieces(const BatchHeader& header) const {
  for (std::size_t index = 0; index < header.num_pieces; ++index) {
    const Piece& piece = pieces_[index];
    const bool is_sound = piece.num_bytes >= 1 && piece.num_bytes <= kMaxPieceBytes && piece.target >= 1 &&
                          piece.target < kMaxAddress && piece.source < kMaxAddress;
    if (!is_sound)
      throw ConnectionLost("malformed frame: piece " + std::to_string(index) + " has bad numbers");
    if (is_shared_ && !find_source(piece)) {
      throw ConnectionLost("malformed frame: piece " + std::to_string(index) +
                           " is outside the shared memory");
    }
  }
}

const std::byte* Receiver::find_source(const Piece& piece) const {
  for (const SharedSource& source : sources_) {
    if (piece.source >= source.peer_address &&
        piece.source + piece.num_bytes <= source.peer_address + source.num_bytes) {
      return source.here + (piece.source - source.peer_address);
    }
  }
  return nullptr;
}

void Receiver::copy_pieces(Placing& placing) const {
  const bool hashes = placing.grant && placing.grant->hashes();
  const std::uint64_t max_step_bytes = hashes ? kMaxHashedStepBytes : kMaxFencedBytes;
  for (std::size_t index = 0; index < pieces_.size(); ++index) {
    const Piece& piece = pieces_[index];
    const std::byte* source = find_source(piece);
    auto* target = reinterpret_cast<std::byte*>(piece.target);
    bool is_placed = placing.is_granted(piece);
    for (std::uint64_t done = 0; is_placed && done < piece.num_bytes; done += max_step_bytes) {
      const std::uint64_t num_bytes = std::min(max_step_bytes, piece.num_bytes - done);
      is_placed = placing.grant->place([&] {
        std::memcpy(target + done, source + done, num_bytes);
        placing.grant->note_placed(piece.target + done, num_bytes);
      });
    }
    if (is_placed) {
      placing.num_placed_bytes += piece.num_bytes;
    } else {
      placing.refuse(index);
    }
  }
}

// Bytes go from the socket straight into place, many pieces per call. The fence is held only while the kernel
// copies what it already has; a grant that is revoked in between turns the rest of the batch into waste.
void Receiver::receive_pieces(Placing& placing) {
  placing.to_place.resize(pieces_.size());
  for (std::size_t index = 0; index < pieces_.size(); ++index) {
    placing.to_place[index] = placing.is_granted(pieces_[index]);
  }
  waste_.resize(kWasteBytes);
  bool is_live = placing.grant != nullptr;
  while (placing.index < pieces_.size()) {
    gather_buffers(placing);
    std::size_t num_bytes = 0;
    if (is_live) {
      is_live = placing.grant->place([&] {
        num_bytes = receive_some(descriptor_, buffers_);
        note_received(*placing.grant, num_bytes);
      });
      if (!is_live) {
        std::fill(placing.to_place.begin() + static_cast<std::ptrdiff_t>(placing.index),
                  placing.to_place.end(), false);
        continue;
      }
    } else {
      num_bytes = receive_some(descriptor_, buffers_);
    }
    if (num_bytes == 0) wait_readable(descriptor_);
    advance(placing, num_bytes);
  }
}

// Where the next bytes of the stream go.
void Receiver::gather_buffers(const Placing& placing) {
  buffers_.clear();
  std::uint64_t begin = placing.num_arrived_bytes;
  std::uint64_t room = kMaxReceivedBytes;
  for (std::size_t index = placing.index; index < pieces_.size(); ++index, begin = 0) {
    const Piece& piece = pieces_[index];
    while (begin < piece.num_bytes) {
      if (room == 0 || buffers_.size() == kMaxBuffers) return;
      std::uint64_t num_bytes = std::min(room, piece.num_bytes - begin);
      if (placing.to_place[index]) {
        append_buffer(reinterpret_cast<std::byte*>(piece.target + begin), num_bytes);
      } else {
        num_bytes = std::min<std::uint64_t>(num_bytes, waste_.size());
        buffers_.push_back({waste_.data(), num_bytes});
      }
      begin += num_bytes;
      room -= num_bytes;
    }
  }
}

// Of the bytes that a call brought, from the first buffer on; those of the waste lie in no grant.
void Receiver::note_received(Grant& grant, std::size_t num_bytes) const {
  if (!grant.hashes()) return;
  for (const iovec& buffer : buffers_) {
    if (num_bytes == 0) return;
    const std::size_t num_here = std::min(num_bytes, buffer.iov_len);
    grant.note_placed(reinterpret_cast<std::uint64_t>(buffer.iov_base), num_here);
    num_bytes -= num_here;
  }
}

void Receiver::append_buffer(std::byte* begin, std::size_t num_bytes) {
  if (!buffers_.empty()) {
    iovec& last = buffers_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == begin) {
      last.iov_len += num_bytes;
      return;
    }
  }
  buffers_.push_back({begin, num_bytes});
}

void Receiver::advance(Placing& placing, std::size_t num_bytes) const {
  placing.num_arrived_bytes += num_bytes;
  for (; placing.index < pieces_.size(); ++placing.index) {
    const std::uint64_t piece_bytes = pieces_[placing.index].num_bytes;
    if (placing.num_arrived_bytes < piece_bytes) return;
    placing.num_arrived_bytes -= piece_bytes;
    if (placing.to_place[placing.index]) {
      placing.num_placed_bytes += piece_bytes;
    } else {
      placing.refuse(placing.index);
    }
  }
}

}  // namespace pdmesh::transfer
