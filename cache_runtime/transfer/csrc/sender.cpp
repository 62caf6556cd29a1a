#include "sender.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "arrival_digests.h"
#include "socket_io.h"

namespace pdmesh::transfer {
namespace {

// What may be posted and not completed: enough to keep both sides busy, little enough that a write that is
// given up ends soon.
constexpr std::size_t kMaxBatchesUnderWay = 64;
constexpr std::uint64_t kMaxBytesUnderWay = 64ull << 20;
// A batch is answered as a whole: this is how often a write makes visible progress.
constexpr std::uint64_t kMaxBatchBytes = 4ull << 20;
// What one call sends of a write whose blocks are hashed: little enough to be in the core's cache afterwards.
constexpr std::uint64_t kMaxHashedCallBytes = 256ull << 10;
constexpr std::size_t kMaxBuffersPerCall = 512;

Sender::Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Sender::Clock::duration>(std::chrono::duration<double>(seconds));
}

std::vector<Piece> cut(std::vector<Piece> runs) {
  const auto is_long = [](const Piece& run) { return run.num_bytes > kMaxPieceBytes; };
  if (std::none_of(runs.begin(), runs.end(), is_long)) return runs;
  std::vector<Piece> pieces;
  for (const Piece& run : runs) {
    for (std::uint64_t done = 0; done < run.num_bytes; done += kMaxPieceBytes) {
      pieces.push_back(
          {run.source + done, run.target + done, std::min(kMaxPieceBytes, run.num_bytes - done)});
    }
  }
  return pieces;
}

}  // namespace

Sender::Sender(int descriptor, bool is_shared, double progress_timeout_s)
    : descriptor_(descriptor),
      is_shared_(is_shared),
      progress_timeout_(to_duration(progress_timeout_s)),
      wake_descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      progressed_at_(Clock::now()) {
  if (wake_descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Sender::~Sender() {
  ::close(wake_descriptor_);
}

void Sender::post(std::uint64_t ticket, const Key& key, std::vector<Piece> runs, double timeout_s,
                  std::span<const Span> blocks, DigestKind kind) {
  Write write{};
  write.ticket = ticket;
  write.key = key;
  write.pieces = cut(std::move(runs));
  write.timeout = to_duration(timeout_s);
  write.deadline = Clock::now() + write.timeout;
  write.core = choose_digest_core(kind);
  write.digests.resize(blocks.size());
  for (std::size_t place = 0; place < blocks.size(); ++place) write.blocks.push_back({blocks[place], place});
  std::sort(write.blocks.begin(), write.blocks.end(),
            [](const OutgoingBlock& left, const OutgoingBlock& right) {
              return left.span.begin < right.span.begin;
            });
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(write));
  }
  wake();
}

void Sender::give_up(std::uint64_t ticket) {
  {
    const std::lock_guard lock(mutex_);
    given_up_.push_back(ticket);
  }
  wake();
}

void Sender::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  wake();
}

void Sender::wake() {
  const std::uint64_t one = 1;
  // It can only fail when the counter is full, and then the thread is awake.
  [[maybe_unused]] const auto ignored = ::write(wake_descriptor_, &one, sizeof one);
}

std::vector<Ending> Sender::drive(double max_wait_s) {
  auto until = Clock::time_point::max();
  while (true) {
    take_posted();
    if (!writes_.empty()) until = std::min(until, Clock::now() + to_duration(max_wait_s));
    stop_overdue(Clock::now());
    const bool moved = work();
    std::vector<Ending> endings = take_endings();
    const bool is_done = is_closing_ && writes_.empty();
    if (!endings.empty() || is_done || !failure_.empty() || Clock::now() >= until) return endings;
    if (!moved) wait(until);
  }
}

void Sender::take_posted() {
  std::vector<Write> posted;
  std::vector<std::uint64_t> given_up;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
    given_up.swap(given_up_);
    is_closing_ = is_closed_;
  }
  for (Write& write : posted) writes_.push_back(std::move(write));
  for (Write& write : writes_) {
    const bool is_given_up = std::find(given_up.begin(), given_up.end(), write.ticket) != given_up.end();
    if ((is_given_up || is_closing_) && write.wants_to_post()) write.stop = Stop::kGivenUp;
  }
}

void Sender::stop_overdue(Clock::time_point now) {
  for (Write& write : writes_) {
    if (write.wants_to_post() && now >= write.deadline) write.stop = Stop::kTimedOut;
  }
}

// Returns whether anything moved.
bool Sender::work() {
  if (!failure_.empty()) return false;
  bool moved = false;
  try {
    moved = take_completions();
    moved = post_batches() || moved;
  } catch (const ConnectionLost& error) {
    failure_ = error.what();
    return true;
  }
  if (moved) progressed_at_ = Clock::now();
  return moved;
}

bool Sender::post_batches() {
  bool moved = flush();
  for (Write& write : writes_) {
    while (write.wants_to_post()) {
      const bool has_room = under_way_.size() < kMaxBatchesUnderWay && under_way_bytes_ < kMaxBytesUnderWay;
      if (num_sent_buffers_ < outgoing_.size() || !has_room) return moved;
      begin_batch(write);
      moved = flush() || moved;
    }
  }
  return moved;
}

void Sender::begin_batch(Write& write) {
  // Before this nobody owed us anything.
  if (under_way_.empty()) progressed_at_ = Clock::now();
  const std::size_t begin = write.num_posted;
  std::size_t end = begin;
  std::uint64_t num_bytes = 0;
  while (end < write.pieces.size() && end - begin < kMaxBatchPieces && num_bytes < kMaxBatchBytes) {
    num_bytes += write.pieces[end++].num_bytes;
  }
  const BatchHeader header{kBatchMagic, static_cast<std::uint32_t>(end - begin), next_batch_++, write.key};
  const std::size_t table_bytes = (end - begin) * sizeof(Piece);
  head_.resize(sizeof header + table_bytes);
  std::memcpy(head_.data(), &header, sizeof header);
  std::memcpy(head_.data() + sizeof header, write.pieces.data() + begin, table_bytes);
  outgoing_.assign(1, {head_.data(), head_.size()});
  num_sent_buffers_ = 0;
  if (!is_shared_) {
    for (std::size_t index = begin; index < end; ++index) append_source(write.pieces[index]);
  }
  write.num_posted = end;
  write.deadline = Clock::now() + write.timeout;
  ++write.num_batches_under_way;
  under_way_.push_back({&write, begin, end, num_bytes});
  under_way_bytes_ += num_bytes;
}

void Sender::append_source(const Piece& piece) {
  iovec& last = outgoing_.back();
  if (reinterpret_cast<std::uint64_t>(last.iov_base) + last.iov_len == piece.source) {
    last.iov_len += piece.num_bytes;
  } else {
    outgoing_.push_back({reinterpret_cast<void*>(piece.source), piece.num_bytes});
  }
}

// Sends what it can of the batch at hand; returns whether anything went out.
bool Sender::flush() {
  bool moved = false;
  while (num_sent_buffers_ < outgoing_.size()) {
    const std::size_t sent = send_some(descriptor_, next_buffers());
    if (sent == 0) return moved;
    moved = true;
    note_sent(sent);
  }
  if (moved && is_shared_) {
    const Batch& batch = under_way_.back();
    for (std::size_t index = batch.begin; index < batch.end; ++index) {
      const Piece& piece = batch.write->pieces[index];
      hash_blocks(*batch.write, piece.source, piece.source + piece.num_bytes);
    }
  }
  return moved;
}

// What the next call sends.
std::span<iovec> Sender::next_buffers() {
  const std::span<iovec> rest = std::span(outgoing_).subspan(num_sent_buffers_);
  const std::size_t num_buffers = std::min(kMaxBuffersPerCall, rest.size());
  if (under_way_.back().write->blocks.empty()) return rest.first(num_buffers);
  call_buffers_.clear();
  std::uint64_t room = kMaxHashedCallBytes;
  for (std::size_t index = 0; index < num_buffers && room > 0; ++index) {
    const std::size_t num_bytes = std::min<std::uint64_t>(room, rest[index].iov_len);
    call_buffers_.push_back({rest[index].iov_base, num_bytes});
    room -= num_bytes;
  }
  return call_buffers_;
}

void Sender::note_sent(std::size_t num_bytes) {
  Write& write = *under_way_.back().write;
  while (num_bytes > 0) {
    iovec& buffer = outgoing_[num_sent_buffers_];
    const std::size_t num_here = std::min(num_bytes, buffer.iov_len);
    const auto begin = reinterpret_cast<std::uint64_t>(buffer.iov_base);
    hash_blocks(write, begin, begin + num_here);
    num_bytes -= num_here;
    if (num_here == buffer.iov_len) {
      ++num_sent_buffers_;
    } else {
      buffer = {static_cast<std::byte*>(buffer.iov_base) + num_here, buffer.iov_len - num_here};
    }
  }
}

// Those that end in what went out just now, sources [begin, end), of which the cache still has the most.
void Sender::hash_blocks(Write& write, std::uint64_t begin, std::uint64_t end) {
  const auto after = [](std::uint64_t address, const OutgoingBlock& block) {
    return address < block.span.end;
  };
  auto block = std::upper_bound(write.blocks.begin(), write.blocks.end(), begin, after);
  for (; block != write.blocks.end() && block->span.end <= end; ++block) {
    write.digests[block->place] = digest_of(write.core, block->span);
  }
}

bool Sender::take_completions() {
  bool moved = false;
  while (true) {
    iovec buffer{incoming_.data() + num_incoming_bytes_, incoming_.size() - num_incoming_bytes_};
    const std::size_t received = receive_some(descriptor_, {&buffer, 1});
    if (received == 0) return moved;
    moved = true;
    num_incoming_bytes_ += received;
    const std::size_t num_whole = num_incoming_bytes_ / sizeof(Completion);
    for (std::size_t index = 0; index < num_whole; ++index) {
      Completion completion;
      std::memcpy(&completion, incoming_.data() + index * sizeof completion, sizeof completion);
      settle(completion);
    }
    num_incoming_bytes_ -= num_whole * sizeof(Completion);
    std::memmove(incoming_.data(), incoming_.data() + num_whole * sizeof(Completion), num_incoming_bytes_);
  }
}

void Sender::settle(const Completion& completion) {
  const std::uint64_t expected = next_batch_ - under_way_.size();
  // A batch that has not gone out whole cannot have been answered.
  const bool is_whole = under_way_.size() > 1 || num_sent_buffers_ == outgoing_.size();
  if (completion.magic != kCompletionMagic || under_way_.empty() || completion.batch != expected ||
      !is_whole) {
    throw ConnectionLost("the peer answers with a malformed frame");
  }
  const Batch batch = under_way_.front();
  const std::size_t num_pieces = batch.end - batch.begin;
  if (completion.num_pieces != num_pieces || completion.num_refused > num_pieces ||
      (completion.num_refused > 0 && completion.first_refused >= num_pieces)) {
    throw ConnectionLost("the peer answers with a malformed frame");
  }
  under_way_.pop_front();
  under_way_bytes_ -= batch.num_bytes;
  Write& write = *batch.write;
  --write.num_batches_under_way;
  if (completion.num_refused == 0) {
    write.num_landed_bytes += batch.num_bytes;
    return;
  }
  if (write.num_refused_pieces == 0)
    write.first_refused = write.pieces[batch.begin + completion.first_refused];
  write.num_refused_pieces += completion.num_refused;
}

std::vector<Ending> Sender::take_endings() {
  std::vector<Ending> endings;
  for (auto write = writes_.begin(); write != writes_.end();) {
    if (failure_.empty() && !write->is_over()) {
      ++write;
      continue;
    }
    endings.push_back(describe(*write));
    write = writes_.erase(write);
  }
  if (!failure_.empty()) {
    under_way_.clear();
    outgoing_.clear();
  }
  return endings;
}

Ending Sender::describe(const Write& write) const {
  Outcome outcome = Outcome::kLanded;
  if (!write.is_over()) {
    outcome = Outcome::kFailed;
  } else if (write.stop != Stop::kNone) {
    outcome = write.stop == Stop::kTimedOut ? Outcome::kTimedOut : Outcome::kGivenUp;
  } else if (write.num_refused_pieces > 0) {
    outcome = Outcome::kRefused;
  }
  return {.ticket = write.ticket,
          .outcome = outcome,
          .num_landed_bytes = write.num_landed_bytes,
          .num_refused_pieces = write.num_refused_pieces,
          .was_begun = write.num_posted > 0,
          .first_refused = write.first_refused,
          .digests = write.digests};
}

void Sender::wait(Clock::time_point until) {
  const bool owes_us = !under_way_.empty();
  const auto stalled_at = progressed_at_ + progress_timeout_;
  if (owes_us) until = std::min(until, stalled_at);
  for (const Write& write : writes_) {
    if (write.wants_to_post()) until = std::min(until, write.deadline);
  }
  int timeout_ms = -1;
  if (until != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000));
  }
  const short wanted = num_sent_buffers_ < outgoing_.size() ? POLLIN | POLLOUT : POLLIN;
  pollfd descriptors[] = {{descriptor_, wanted, 0}, {wake_descriptor_, POLLIN, 0}};
  const int num_ready = poll(descriptors, 2, timeout_ms);
  if (num_ready > 0 && descriptors[1].revents) {
    std::uint64_t count;
    [[maybe_unused]] const auto ignored = ::read(wake_descriptor_, &count, sizeof count);
  }
  // Judged only when the peer had nothing to say: a process that was stopped itself finds its answers first.
  if (num_ready == 0 && owes_us && Clock::now() >= stalled_at) {
    const auto seconds = std::chrono::duration<double>(progress_timeout_).count();
    failure_ = "no progress within " + std::to_string(seconds) + " s";
  }
}

}  // namespace pdmesh::transfer
