// The receiver's fence and both ends of a connection, with memory passing between threads.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "digest_variants.h"
#include "grant_table.h"
#include "receiver.h"
#include "sender.h"

namespace pdmesh::transfer {
namespace {

constexpr Key kKey = {1, 2, 3};
constexpr Key kOther = {4, 5, 6};
constexpr double kPatienceS = 30;

using Bytes = std::vector<std::uint8_t>;

std::uint64_t address(const Bytes& bytes, std::size_t offset = 0) {
  return reinterpret_cast<std::uint64_t>(bytes.data()) + offset;
}

Span span(const Bytes& bytes, std::size_t begin, std::size_t end) {
  return {address(bytes, begin), address(bytes, end)};
}

TEST(GrantTest, CoversWhatItsSpansHoldAndNothingAcrossAGap) {
  const Grant grant({{100, 200}, {300, 400}, {200, 250}, {390, 410}});
  EXPECT_TRUE(grant.covers(100, 150));
  EXPECT_TRUE(grant.covers(199, 2));
  EXPECT_TRUE(grant.covers(300, 110));
  EXPECT_FALSE(grant.covers(99, 2));
  EXPECT_FALSE(grant.covers(249, 2));
  EXPECT_FALSE(grant.covers(260, 1));
  EXPECT_FALSE(grant.covers(249, 60));
  EXPECT_FALSE(grant.covers(410, 1));
  EXPECT_FALSE(grant.covers(kMaxAddress - 1, kMaxPieceBytes));
}

TEST(GrantTest, RefusesSpansThatAreEmptyOrWrap) {
  EXPECT_THROW(Grant({}), std::invalid_argument);
  EXPECT_THROW(Grant({{5, 5}}), std::invalid_argument);
  EXPECT_THROW(Grant({{6, 5}}), std::invalid_argument);
  EXPECT_THROW(Grant({{0, 5}}), std::invalid_argument);
  EXPECT_THROW(Grant({{5, kMaxAddress + 1}}), std::invalid_argument);
}

TEST(GrantTest, NothingIsPlacedOnceRevokeReturned) {
  for (int round = 0; round < 50; ++round) {
    Grant grant({{100, 200}});
    std::atomic<bool> is_revoked = false;
    std::atomic<int> num_placed = 0, num_late = 0;
    std::thread placing([&] {
      while (grant.place([&] {
        num_late += is_revoked;
        ++num_placed;
      })) {
      }
    });
    while (num_placed < 3) std::this_thread::yield();
    grant.revoke();
    is_revoked = true;
    placing.join();
    EXPECT_EQ(num_late, 0);
  }
}

TEST(GrantTableTest, AKeyHasOneLiveGrantAndCloseEndsAll) {
  GrantTable table;
  const auto first = table.allow(kKey, {{100, 200}});
  EXPECT_THROW(table.allow(kKey, {{100, 200}}), std::invalid_argument);
  EXPECT_EQ(table.find(kKey), first);
  EXPECT_EQ(table.find(kOther), nullptr);
  table.revoke(kKey, first);
  const auto second = table.allow(kKey, {{300, 400}});
  table.revoke(kKey, first);
  EXPECT_EQ(table.find(kKey), second);
  table.close();
  EXPECT_EQ(table.find(kKey), nullptr);
  EXPECT_FALSE(second->place([] {}));
  EXPECT_THROW(table.allow(kOther, {{100, 200}}), std::runtime_error);
}

// Without zeros, and without a period that a run length shares. In few calls, for sanitizers check every
// single access.
void fill_with_noise(Bytes& bytes) {
  constexpr std::size_t kPeriod = 4099;
  std::mt19937 random(7);
  std::array<std::uint8_t, kPeriod> noise;
  for (std::uint8_t& byte : noise) byte = static_cast<std::uint8_t>(1 + random() % 255);
  for (std::size_t at = 0; at < bytes.size(); at += kPeriod) {
    std::memcpy(bytes.data() + at, noise.data(), std::min(kPeriod, bytes.size() - at));
  }
}

// A writer and a receiver in two threads, and the memory of both.
class Connection {
 public:
  Connection(bool is_shared, std::size_t num_bytes, double progress_timeout_s = kPatienceS)
      : source(num_bytes), target(num_bytes), grants(std::make_shared<GrantTable>()) {
    fill_with_noise(source);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends_.data()) != 0) throw std::runtime_error("socketpair");
    std::vector<SharedSource> sources;
    if (is_shared) {
      sources.push_back({address(source), num_bytes, reinterpret_cast<const std::byte*>(source.data())});
    }
    sender = std::make_unique<Sender>(ends_[0], is_shared, progress_timeout_s);
    receiver_ = std::make_unique<Receiver>(grants, ends_[1], is_shared, std::move(sources));
  }

  ~Connection() {
    hang_up();
    if (serving_.joinable()) serving_.join();
    for (const int end : ends_) close(end);
  }

  void serve() {
    serving_ = std::thread([this] { served = receiver_->serve(); });
  }

  void hang_up() { shutdown(ends_[1], SHUT_RDWR); }

  // Runs of `run_bytes` from sources in order to targets in disorder.
  std::vector<Piece> scattered(std::size_t run_bytes) const {
    std::vector<std::size_t> places(source.size() / run_bytes);
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), std::mt19937(3));
    std::vector<Piece> runs;
    for (std::size_t index = 0; index < places.size(); ++index) {
      runs.push_back(
          {address(source, index * run_bytes), address(target, places[index] * run_bytes), run_bytes});
    }
    return runs;
  }

  bool has_landed(const Piece& run) const {
    return std::memcmp(reinterpret_cast<void*>(run.source), reinterpret_cast<void*>(run.target),
                       run.num_bytes) == 0;
  }

  // The endings of `num_writes`, by ticket.
  std::map<std::uint64_t, Ending> drive(std::size_t num_writes) {
    std::map<std::uint64_t, Ending> endings;
    while (endings.size() < num_writes) {
      for (const Ending& ending : sender->drive(kPatienceS)) endings.emplace(ending.ticket, ending);
    }
    return endings;
  }

  Bytes source, target;
  std::shared_ptr<GrantTable> grants;
  std::unique_ptr<Sender> sender;
  std::string served;

 private:
  std::array<int, 2> ends_{};
  std::unique_ptr<Receiver> receiver_;
  std::thread serving_;
};

class ConnectionTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Kinds, ConnectionTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Stream"; });

TEST_P(ConnectionTest, RunsOfEveryLengthLandWhereTheyWereSent) {
  for (const std::size_t run_bytes :
       {std::size_t{1}, std::size_t{4096}, std::size_t{70'000}, std::size_t{9} << 20}) {
    Connection connection(GetParam(), run_bytes == 1 ? 5000 : std::max(run_bytes, std::size_t{1} << 20));
    connection.grants->allow(kKey, {span(connection.target, 0, connection.target.size())});
    connection.serve();
    const auto runs = connection.scattered(run_bytes);
    connection.sender->post(1, kKey, runs, kPatienceS);
    const auto endings = connection.drive(1);
    EXPECT_EQ(endings.at(1).outcome, Outcome::kLanded);
    EXPECT_EQ(endings.at(1).num_landed_bytes, runs.size() * run_bytes);
    EXPECT_TRUE(
        std::all_of(runs.begin(), runs.end(), [&](const Piece& run) { return connection.has_landed(run); }));
  }
}

TEST_P(ConnectionTest, ARevocationUnderWritesIsTheLastChangeOfTheMemory) {
  Connection connection(GetParam(), 8 << 20);
  const auto grant = connection.grants->allow(kKey, {span(connection.target, 0, connection.target.size())});
  connection.serve();
  const auto runs = connection.scattered(64 << 10);
  for (std::size_t index = 0; index < runs.size(); ++index) {
    connection.sender->post(index, kKey, {runs[index]}, kPatienceS);
  }
  Bytes seen;
  std::thread revoking([&] {
    while (connection.grants->num_placed_bytes() < 1 << 20) std::this_thread::yield();
    connection.grants->revoke(kKey, grant);
    seen = connection.target;
  });
  const auto endings = connection.drive(runs.size());
  revoking.join();
  EXPECT_EQ(connection.target, seen);
  for (std::size_t index = 0; index < runs.size(); ++index) {
    const bool is_landed = endings.at(index).outcome == Outcome::kLanded;
    EXPECT_TRUE(is_landed || endings.at(index).outcome == Outcome::kRefused);
    EXPECT_TRUE(!is_landed || connection.has_landed(runs[index]));
  }
}

TEST_P(ConnectionTest, OfAWriteThePiecesThatAreNotGrantedAreNamed) {
  Connection connection(GetParam(), 1 << 20);
  connection.grants->allow(kKey, {span(connection.target, 0, 4096), span(connection.target, 8192, 12288)});
  connection.serve();
  std::vector<Piece> runs;
  for (std::size_t at = 0; at < 16384; at += 4096) {
    runs.push_back({address(connection.source, at), address(connection.target, at), 4096});
  }
  connection.sender->post(1, kKey, runs, kPatienceS);
  const Ending ending = connection.drive(1).at(1);
  EXPECT_EQ(ending.outcome, Outcome::kRefused);
  EXPECT_EQ(ending.num_refused_pieces, 2u);
  EXPECT_EQ(ending.first_refused.target, address(connection.target, 4096));
  EXPECT_EQ(connection.grants->num_refused_pieces(), 2u);
  EXPECT_TRUE(connection.has_landed(runs[0]) && connection.has_landed(runs[2]));
  EXPECT_TRUE(std::all_of(connection.target.begin() + 4096, connection.target.begin() + 8192,
                          [](std::uint8_t byte) { return byte == 0; }));
}

TEST_P(ConnectionTest, EveryWriteEndsWhenTheReceiverHangsUp) {
  Connection connection(GetParam(), 16 << 20);
  connection.grants->allow(kKey, {span(connection.target, 0, connection.target.size())});
  for (std::uint64_t ticket = 0; ticket < 5; ++ticket) {
    connection.sender->post(ticket, kKey, connection.scattered(1 << 20), kPatienceS);
  }
  connection.hang_up();
  for (const auto& [ticket, ending] : connection.drive(5)) EXPECT_EQ(ending.outcome, Outcome::kFailed);
  EXPECT_NE(connection.sender->failure(), "");
  connection.sender->post(9, kKey, connection.scattered(1 << 20), kPatienceS);
  EXPECT_EQ(connection.drive(1).at(9).outcome, Outcome::kFailed);
}

TEST_P(ConnectionTest, AReceiverThatDoesNothingIsGivenUp) {
  Connection connection(GetParam(), 16 << 20, 0.1);
  connection.sender->post(1, kKey, connection.scattered(1 << 20), kPatienceS);
  EXPECT_EQ(connection.drive(1).at(1).outcome, Outcome::kFailed);
  EXPECT_NE(connection.sender->failure().find("no progress"), std::string::npos);
}

TEST_P(ConnectionTest, WhatIsNotPostedInTimeOrNoLongerWantedIsNeverSent) {
  Connection connection(GetParam(), 1 << 20);
  connection.grants->allow(kKey, {span(connection.target, 0, connection.target.size())});
  connection.sender->post(1, kKey, connection.scattered(4096), 0.0);
  connection.sender->post(2, kKey, connection.scattered(4096), kPatienceS);
  connection.sender->give_up(2);
  const auto endings = connection.drive(2);
  EXPECT_EQ(endings.at(1).outcome, Outcome::kTimedOut);
  EXPECT_FALSE(endings.at(1).was_begun);
  EXPECT_EQ(endings.at(2).outcome, Outcome::kGivenUp);
  connection.serve();
  connection.sender->post(3, kKey, {}, kPatienceS);
  EXPECT_EQ(connection.drive(1).at(3).outcome, Outcome::kLanded);
  connection.sender->close();
  EXPECT_TRUE(connection.sender->drive(kPatienceS).empty());
  EXPECT_EQ(connection.grants->num_placed_bytes(), 0u);
}

TEST_P(ConnectionTest, BlocksAreHashedAsTheyMoveWhileOthersAskForThem) {
  constexpr std::size_t kBlockBytes = 10'000, kNumBlocks = 400;
  const DigestKind kind = runnable_digest_kinds().front();
  Connection connection(GetParam(), kNumBlocks * kBlockBytes);
  std::vector<Span> sent, placed;
  for (std::size_t at = 0; at < connection.source.size(); at += kBlockBytes) {
    sent.push_back(span(connection.source, at, at + kBlockBytes));
    placed.push_back(span(connection.target, at, at + kBlockBytes));
  }
  const auto grant = connection.grants->allow(kKey, placed, kind);
  connection.serve();
  std::vector<std::uint64_t> expected(kNumBlocks), found(kNumBlocks);
  for (std::size_t block = 0; block < kNumBlocks; ++block) {
    expected[block] = digest_of(choose_digest_core(kind), sent[block]);
  }
  std::atomic<bool> is_over = false;
  std::thread asking([&] {
    // Blocks that have landed; those that have not would be read under the writer's hand.
    std::vector<std::uint64_t> one(1);
    while (!is_over) {
      if (grant->num_hashed_spans() == kNumBlocks) grant->digest(kind, {&placed[3], 1}, one);
    }
  });
  const Piece whole{address(connection.source), address(connection.target), connection.source.size()};
  connection.sender->post(1, kKey, {whole}, kPatienceS, sent, kind);
  const Ending ending = connection.drive(1).at(1);
  is_over = true;
  asking.join();
  EXPECT_EQ(ending.outcome, Outcome::kLanded);
  EXPECT_EQ(ending.digests, expected);
  EXPECT_EQ(grant->num_hashed_spans(), kNumBlocks);
  grant->digest(kind, placed, found);
  EXPECT_EQ(found, expected);
  // One of another kind is taken of what the block holds now.
  grant->digest(DigestKind::kXxh3, {&placed[7], 1}, {found.data(), 1});
  EXPECT_EQ(found[0], digest_of(choose_digest_core(DigestKind::kXxh3), sent[7]));
}

TEST_P(ConnectionTest, AWriteWhoseTurnDoesNotComeEndsInTimeAndTheOneAheadOfItIsNotHurried) {
  Connection connection(GetParam(), 2 << 20);
  connection.grants->allow(kKey, {span(connection.target, 0, connection.target.size())});
  // More than may be under way, and nobody takes it yet: what comes behind waits.
  connection.sender->post(1, kKey, connection.scattered(16), kPatienceS);
  connection.sender->post(2, kKey, connection.scattered(1 << 20), 0.05);
  const Ending late = connection.drive(1).at(2);
  EXPECT_EQ(late.outcome, Outcome::kTimedOut);
  EXPECT_FALSE(late.was_begun);
  connection.serve();
  const Ending first = connection.drive(1).at(1);
  EXPECT_EQ(first.outcome, Outcome::kLanded);
  EXPECT_TRUE(first.was_begun);
}

}  // namespace
}  // namespace pdmesh::transfer
