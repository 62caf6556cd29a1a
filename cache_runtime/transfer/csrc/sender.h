// The writing end of one connection: turns writes into batches, keeps a bounded number of them under way, and
// says how each write ended.
//
// One thread drives it; writes are posted and given up from any thread. Every write ends: by its completions,
// or because the connection broke or made no progress. Knows no interpreter.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "digest_core.h"
#include "digest_variants.h"
#include "frames.h"
#include "span.h"

namespace pdmesh::transfer {

enum class Outcome {
  kLanded,
  kRefused,   // the receiver dropped pieces that were not granted
  kTimedOut,  // it waited too long, for its turn or for room to post more
  kGivenUp,   // `give_up` or `close` came before everything was posted
  kFailed,    // the connection can be used no more; `failure` says why
};

struct Ending {
  std::uint64_t ticket;
  Outcome outcome;
  std::uint64_t num_landed_bytes;
  std::uint64_t num_refused_pieces;
  bool was_begun;                      // something of it was posted
  Piece first_refused;                 // meaningful when num_refused_pieces > 0
  std::vector<std::uint64_t> digests;  // one for each block that was to be hashed
};

class Sender {
 public:
  using Clock = std::chrono::steady_clock;

  // `descriptor`: a connected stream socket, which stays the caller's. With `is_shared` the receiver takes
  // the bytes from shared memory, otherwise they are sent along. Throws std::system_error.
  Sender(int descriptor, bool is_shared, double progress_timeout_s);
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  // Queues a write; its sources must stay as they are until it ended. Runs longer than a piece may be are
  // cut. `timeout_s`: how long it may wait until something of it is posted, and from there on until more is.
  // `blocks`: parts of the sources that are hashed as they go out, each as a whole, into digests of `kind`; a
  // block must lie in one run.
  void post(std::uint64_t ticket, const Key& key, std::vector<Piece> runs, double timeout_s,
            std::span<const Span> blocks = {}, DigestKind kind = DigestKind::kXxh3);

  // Posts nothing more of a write; of every write, and lets `drive` end when none is left.
  void give_up(std::uint64_t ticket);
  void close();

  // Works until writes have ended, or for `max_wait_s` from the moment at which there is one. Returns at once
  // with nothing after `close`, once no write is left, and after a failure. To be called by one thread at a
  // time.
  std::vector<Ending> drive(double max_wait_s);

  // Why the connection can be used no more; empty while it can. Belongs to the thread that drives.
  const std::string& failure() const { return failure_; }

 private:
  enum class Stop { kNone, kTimedOut, kGivenUp };

  struct OutgoingBlock {
    Span span;
    std::size_t place;  // of its digest
  };

  struct Write {
    std::uint64_t ticket;
    Key key;
    std::vector<Piece> pieces;
    Clock::duration timeout;
    Clock::time_point deadline;         // of the next batch
    std::vector<OutgoingBlock> blocks;  // by their end
    DigestCore core;
    std::vector<std::uint64_t> digests;
    std::size_t num_posted = 0;  // pieces
    std::uint32_t num_batches_under_way = 0;
    std::uint64_t num_landed_bytes = 0;
    std::uint64_t num_refused_pieces = 0;
    Piece first_refused{};
    Stop stop = Stop::kNone;

    bool wants_to_post() const { return stop == Stop::kNone && num_posted < pieces.size(); }
    bool is_over() const { return !wants_to_post() && num_batches_under_way == 0; }
  };

  struct Batch {
    Write* write;
    std::size_t begin;  // pieces [begin, end) of the write
    std::size_t end;
    std::uint64_t num_bytes;
  };

  void take_posted();
  void stop_overdue(Clock::time_point now);
  bool work();
  bool post_batches();
  void begin_batch(Write& write);
  static void hash_blocks(Write& write, std::uint64_t begin, std::uint64_t end);
  void append_source(const Piece& piece);
  bool flush();
  std::span<iovec> next_buffers();
  void note_sent(std::size_t num_bytes);
  bool take_completions();
  void settle(const Completion& completion);
  std::vector<Ending> take_endings();
  Ending describe(const Write& write) const;
  void wait(Clock::time_point until);
  void wake();

  const int descriptor_;
  const bool is_shared_;
  const Clock::duration progress_timeout_;
  int wake_descriptor_;

  std::mutex mutex_;
  std::vector<Write> posted_;
  std::vector<std::uint64_t> given_up_;
  bool is_closed_ = false;

  // What follows belongs to the thread that drives.
  std::list<Write> writes_;
  std::deque<Batch> under_way_;
  std::uint64_t under_way_bytes_ = 0;
  std::uint64_t next_batch_ = 0;
  std::vector<std::byte> head_;
  std::vector<iovec> outgoing_;  // of the batch that is being sent
  std::size_t num_sent_buffers_ = 0;
  std::vector<iovec> call_buffers_;
  std::array<std::byte, 64 * sizeof(Completion)> incoming_;
  std::size_t num_incoming_bytes_ = 0;
  Clock::time_point progressed_at_;
  bool is_closing_ = false;
  std::string failure_;
};

}  // namespace pdmesh::transfer
