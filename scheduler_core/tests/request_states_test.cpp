#include "fsm/request_states.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <type_traits>

namespace pdmesh {
namespace {

Holdings MakeHoldings(BlockPool& pool, SlotPool& slots) {
  Holdings holdings;
  holdings.slot = slots.Lease();
  holdings.tables.resize(1);
  std::vector<CacheBlockRef> blocks = std::move(*pool.Acquire(0, 3));
  for (CacheBlockRef& block : blocks) {
    holdings.tables[0].Append(std::move(block));
  }
  holdings.epoch = 7;
  holdings.num_hit_tokens = 4;
  holdings.num_computed_tokens = 9;
  return holdings;
}

void ExpectWhole(const Holdings& holdings) {
  EXPECT_EQ(holdings.slot.slot(), 1);
  EXPECT_TRUE(std::ranges::equal(holdings.tables.at(0).block_ids(), std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(holdings.epoch, 7u);
  EXPECT_EQ(holdings.num_hit_tokens, 4);
  EXPECT_EQ(holdings.num_computed_tokens, 9);
}

// behaviour: B4, B5
TEST(RequestStates, ATransitionMovesAllThatARequestHolds) {
  BlockPool pool(3, {1});
  SlotPool slots(1);
  {
    Prefilling prefilling = StartPrefill(Waiting(), MakeHoldings(pool, slots));
    ExpectWhole(prefilling.holdings);
    AwaitingResult awaiting = CompletePrompt(std::move(prefilling));
    ExpectWhole(awaiting.holdings);
    PrefillDone done = LandFirstToken(std::move(awaiting));
    ExpectWhole(done.holdings);
    const Decoding decoding = StartDecoding(std::move(done));
    ExpectWhole(decoding.holdings);
    EXPECT_EQ(pool.num_freed_slots(), 0u) << "nothing was given up on the way";
    EXPECT_FALSE(slots.has_free_slot());
  }
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 3);
  EXPECT_TRUE(slots.has_free_slot());
}

// behaviour: B5, L9
TEST(RequestStates, AQuarantineKeepsTheGrantedBlocksAndReturnsSlotAndHits) {
  BlockPool pool(3, {1});
  SlotPool slots(1);
  RemotePrefilling remote = GrantRemotePrefill(Waiting(), MakeHoldings(pool, slots));
  const Quarantined quarantined = Quarantine(std::move(remote), {1});
  EXPECT_TRUE(std::ranges::equal(quarantined.tables[0].block_ids(), std::vector<std::int32_t>{0, 2, 3}));
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 1);
}

template <typename State>
constexpr bool kCompletesPrompt = requires(State&& state) { CompletePrompt(std::move(state)); };
template <typename State>
constexpr bool kStartsDecoding = requires(State&& state) { StartDecoding(std::move(state)); };
template <typename State>
constexpr bool kStartsHandover = requires(State&& state) { StartHandover(std::move(state)); };
template <typename State>
constexpr bool kIsQuarantined = requires(State&& state) { Quarantine(std::move(state), {}); };

// behaviour: B5
TEST(RequestStates, WhatIsNoTransitionDoesNotCompile) {
  static_assert(kCompletesPrompt<Prefilling> && !kCompletesPrompt<Decoding> && !kCompletesPrompt<Waiting>);
  static_assert(kStartsDecoding<PrefillDone> && !kStartsDecoding<Prefilling> && !kStartsDecoding<Waiting>);
  static_assert(kStartsHandover<PrefillDone> && !kStartsHandover<Prefilling>);
  static_assert(kIsQuarantined<RemotePrefilling> && !kIsQuarantined<Prefilling>);
  static_assert(!std::is_copy_constructible_v<Holdings>, "what a request holds has one owner");
}

// behaviour: B4
TEST(SlotPool, SlotsCountFromOneAreUniqueAndTheLowestFreeOneIsReused) {
  SlotPool slots(2);
  SlotLease first = slots.Lease();
  const SlotLease second = slots.Lease();
  EXPECT_EQ(first.slot(), 1);
  EXPECT_EQ(second.slot(), 2);
  EXPECT_FALSE(slots.has_free_slot());
  first.Reset();
  EXPECT_EQ(slots.Lease().slot(), 1);
}

}  // namespace
}  // namespace pdmesh
