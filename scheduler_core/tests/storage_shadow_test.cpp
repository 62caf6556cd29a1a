#include "cache/tier/storage_shadow.h"

#include <gtest/gtest.h>

#include <vector>

#include "content_keys.h"

namespace pdmesh {
namespace {

std::vector<CacheKey> Keys(std::uint8_t first, std::uint8_t end) {
  std::vector<CacheKey> keys;
  for (std::uint8_t content = first; content < end; ++content) {
    keys.push_back(Key(content));
  }
  return keys;
}

std::vector<int> Known(const StorageShadow& shadow) {
  std::vector<int> known;
  for (int content = 0; content < 256; ++content) {
    if (shadow.Contains(Key(static_cast<std::uint8_t>(content)))) {
      known.push_back(content);
    }
  }
  return known;
}

// behaviour: O1
TEST(StorageShadow, KnowsNoMoreKeysThanItMay) {
  StorageShadow shadow(4);
  shadow.Register(Keys(1, 9));
  shadow.Register(Keys(20, 22));
  EXPECT_EQ(shadow.num_keys(), 4);
}

// behaviour: O2
TEST(StorageShadow, KeepsTheFrontOfAPrefixWithoutAGap) {
  StorageShadow shadow(4);
  shadow.Register(Keys(1, 9));
  EXPECT_EQ(Known(shadow), (std::vector<int>{1, 2, 3, 4}));
}

// behaviour: O2
TEST(StorageShadow, KeepsTheFrontAlsoWhenTheRearWasWrittenBefore) {
  StorageShadow shadow(6);
  shadow.RegisterWritten(Keys(5, 9), {});
  shadow.Register(Keys(1, 9));
  EXPECT_EQ(Known(shadow), (std::vector<int>{1, 2, 3, 4, 5, 6}));
}

// behaviour: O2
TEST(StorageShadow, OtherPromptsLeaveLeastRecentlyUsedFirstAndRearFirst) {
  StorageShadow shadow(6);
  shadow.Register(Keys(10, 13));
  shadow.Register(Keys(20, 23));
  shadow.Register(Keys(10, 13));
  shadow.Register(Keys(30, 32));
  EXPECT_EQ(Known(shadow), (std::vector<int>{10, 11, 12, 20, 30, 31}));
}

// behaviour: O2
TEST(StorageShadow, UnregisteringLeavesNothingBehind) {
  StorageShadow shadow(3);
  shadow.Register(Keys(1, 4));
  shadow.Unregister(Keys(1, 3));
  EXPECT_EQ(Known(shadow), std::vector<int>{3});
  shadow.Register(Keys(7, 9));  // there is room for both beside the one that is left
  EXPECT_EQ(Known(shadow), (std::vector<int>{3, 7, 8}));
}

// behaviour: O8
TEST(StorageShadow, AMissedKeyComesBackOnlyWhenABackupCreatedIt) {
  StorageShadow shadow(8);
  shadow.Register(Keys(1, 4));
  shadow.MarkUnreadable(Key(2));
  EXPECT_EQ(Known(shadow), (std::vector<int>{1, 3}));
  shadow.Register(Keys(1, 4));
  EXPECT_FALSE(shadow.Contains(Key(2)));
  shadow.RegisterWritten(Keys(1, 4), {});  // the object was there already, as unreadable as before
  EXPECT_FALSE(shadow.Contains(Key(2)));
  shadow.RegisterWritten(Keys(1, 4), Keys(2, 3));
  EXPECT_EQ(Known(shadow), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(shadow.num_unreadable_keys(), 0);
}

// behaviour: O8
TEST(StorageShadow, RemembersNoMoreUnreadableKeysThanItMay) {
  StorageShadow shadow(2);
  for (const CacheKey& key : Keys(1, 5)) {
    shadow.MarkUnreadable(key);
  }
  EXPECT_EQ(shadow.num_unreadable_keys(), 2);
  shadow.Register(Keys(1, 5));
  EXPECT_EQ(Known(shadow), (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace pdmesh
