#include "cache/prefix/aged_frequency.h"

#include <gtest/gtest.h>

#include "coordinator_fixture.h"

namespace pdmesh {
namespace {

std::vector<int> UsesOf(const PromptUses& prompt, std::int64_t num_grains) {
  std::vector<int> uses;
  for (std::int64_t grain = 0; grain < num_grains; ++grain) {
    uses.push_back(prompt.UsesOf(grain));
  }
  return uses;
}

BlockUse Worth(std::uint64_t value, std::uint8_t uses = 0, bool is_remembered = false) {
  return {.value = value, .uses = uses, .is_remembered = is_remembered};
}

TEST(AgedFrequency, WhatWasNeverSeenStartsOneAboveTheLevel) {
  AgedFrequency policy(8);
  const std::vector<Digest> digests = ChainOf(1, 3);
  EXPECT_EQ(policy.UsesFor(digests, {}).UseOf(0).value, 1u);
  policy.RaiseLevel(Worth(41));
  const PromptUses prompt = policy.UsesFor(digests, {});
  EXPECT_EQ(prompt.UseOf(2).value, 42u);
  EXPECT_EQ(prompt.UseOf(2).uses, 0);
}

TEST(AgedFrequency, EveryUseIsWorthTwoLevelsUpToSeven) {
  const AgedFrequency policy(8);
  const std::vector<Digest> digests = ChainOf(1, 1);
  for (const auto& [before, after, value] : {std::tuple{0, 1, 3u}, {1, 2, 5u}, {6, 7, 15u}, {7, 7, 15u}}) {
    const std::vector<std::uint8_t> cached = {static_cast<std::uint8_t>(before)};
    const BlockUse use = policy.UsesFor(digests, cached).UseOf(0);
    EXPECT_EQ(use.uses, after);
    EXPECT_EQ(use.value, value);
  }
}

TEST(AgedFrequency, AUseCountsForTheWholePrefixBeforeIt) {
  const AgedFrequency policy(8);
  const std::vector<std::uint8_t> cached = {5, 1, 2, 0};
  const PromptUses prompt = policy.UsesFor(ChainOf(1, 6), cached);
  EXPECT_EQ(UsesOf(prompt, 8), (std::vector<int>{6, 3, 3, 1, 0, 0, 0, 0}));
}

TEST(AgedFrequency, OnlyTheLastGrainOfAPromptIsRemembered) {
  const AgedFrequency policy(8);
  const PromptUses prompt = policy.UsesFor(ChainOf(1, 3), {});
  EXPECT_FALSE(prompt.UseOf(1).is_remembered);
  EXPECT_TRUE(prompt.UseOf(2).is_remembered);
  EXPECT_FALSE(prompt.UseOf(3).is_remembered) << "of the completion";
}

TEST(AgedFrequency, TheLevelNeverFalls) {
  AgedFrequency policy(8);
  policy.RaiseLevel(Worth(9));
  policy.RaiseLevel(Worth(4));
  EXPECT_EQ(policy.level(), 9u);
}

TEST(AgedFrequency, AGhostSpeaksForItsWholePrefix) {
  AgedFrequency policy(8);
  const std::vector<Digest> digests = ChainOf(1, 4);
  policy.RememberEnd(digests[2], 2, Worth(7, 3, true));
  EXPECT_EQ(UsesOf(policy.UsesFor(digests, {}), 4), (std::vector<int>{4, 4, 4, 0}));
  const std::vector<std::uint8_t> cached = {6};
  EXPECT_EQ(UsesOf(policy.UsesFor(digests, cached), 4), (std::vector<int>{7, 4, 4, 0}));
  policy.Forget(digests[2]);
  EXPECT_EQ(UsesOf(policy.UsesFor(digests, {}), 4), (std::vector<int>{0, 0, 0, 0}));
}

TEST(AgedFrequency, GhostsAreSparse) {
  AgedFrequency policy(64);
  const std::vector<Digest> digests = ChainOf(1, 48);
  for (std::int64_t grain = 0; grain < 48; ++grain) {
    policy.RememberEnd(digests[static_cast<std::size_t>(grain)], grain, Worth(1, 0, grain == 40));
  }
  EXPECT_EQ(policy.num_ghosts(), 4) << "grains 15, 31, 47 and the end of a prompt";
}

TEST(AgedFrequency, TheOldestGhostsGoFirst) {
  AgedFrequency policy(2);
  const std::vector<Digest> digests = ChainOf(1, 3);
  for (std::int64_t grain = 0; grain < 3; ++grain) {
    policy.RememberEnd(digests[static_cast<std::size_t>(grain)], grain, Worth(1, 0, true));
  }
  EXPECT_EQ(policy.num_ghosts(), 2);
  EXPECT_EQ(UsesOf(policy.UsesFor(std::span(digests).first(1), {}), 1), (std::vector<int>{0}));
  EXPECT_EQ(UsesOf(policy.UsesFor(std::span(digests).first(2), {}), 2), (std::vector<int>{1, 1}));
}

TEST(AgedFrequency, AStaleGhostTakesANewOneOfItsGrainNotAlong) {
  AgedFrequency policy(2);
  const std::vector<Digest> digests = ChainOf(1, 2);
  policy.RememberEnd(digests[0], 0, Worth(1, 0, true));
  policy.Forget(digests[0]);
  policy.RememberEnd(digests[0], 0, Worth(1, 4, true));
  policy.RememberEnd(digests[1], 1, Worth(1, 0, true));  // the line is full: its stale front goes
  EXPECT_EQ(policy.num_ghosts(), 2);
  EXPECT_EQ(policy.UsesFor(digests, {}).UsesOf(0), 5);
}

TEST(AgedFrequency, GroupsThatEvictTheSameGrainShareAGhost) {
  AgedFrequency policy(2);
  const std::vector<Digest> digests = ChainOf(1, 2);
  policy.RememberEnd(digests[0], 0, Worth(1, 2, true));
  policy.RememberEnd(digests[0], 0, Worth(1, 1, true));
  policy.RememberEnd(digests[1], 1, Worth(1, 0, true));
  EXPECT_EQ(policy.num_ghosts(), 2);
  EXPECT_EQ(policy.UsesFor(digests, {}).UsesOf(0), 3);
}

TEST(AgedFrequency, ClearingDropsTheGhostsAndKeepsTheLevel) {
  AgedFrequency policy(2);
  const std::vector<Digest> digests = ChainOf(1, 1);
  policy.RaiseLevel(Worth(5));
  policy.RememberEnd(digests[0], 0, Worth(5, 3, true));
  policy.Clear();
  EXPECT_EQ(policy.num_ghosts(), 0);
  EXPECT_EQ(policy.UsesFor(digests, {}).UseOf(0).value, 6u);
}

TEST(BlockUse, NothingAboutABlockEverFalls) {
  BlockUse use = Worth(9, 2, false);
  use.RaiseTo(Worth(4, 3, true));
  EXPECT_EQ(use.value, 9u);
  EXPECT_EQ(use.uses, 3);
  EXPECT_TRUE(use.is_remembered);
}

}  // namespace
}  // namespace pdmesh
