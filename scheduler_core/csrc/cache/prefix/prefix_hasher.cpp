#include "cache/prefix/prefix_hasher.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace pdmesh {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the hash layout is written from little-endian memory");

constexpr std::size_t kCountBytes = 4;

void AppendCount(std::vector<std::uint8_t>& message, std::size_t count) {
  const auto word = static_cast<std::uint32_t>(count);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&word);
  message.insert(message.end(), bytes, bytes + kCountBytes);
}

std::vector<std::uint8_t> MessageOf(std::span<const std::uint8_t> previous,
                                    std::span<const std::int32_t> tokens,
                                    std::span<const std::string> extra_keys) {
  std::vector<std::uint8_t> message;
  message.reserve(2 * kCountBytes + previous.size() + tokens.size_bytes());
  AppendCount(message, previous.size());
  message.insert(message.end(), previous.begin(), previous.end());
  AppendCount(message, tokens.size());
  const auto* token_bytes = reinterpret_cast<const std::uint8_t*>(tokens.data());
  message.insert(message.end(), token_bytes, token_bytes + tokens.size_bytes());
  if (!extra_keys.empty()) {
    AppendCount(message, extra_keys.size());
    for (const std::string& key : extra_keys) {
      AppendCount(message, key.size());
      message.insert(message.end(), key.begin(), key.end());
    }
  }
  return message;
}

}  // namespace

Digest HashGrain(std::span<const std::uint8_t> previous, std::span<const std::int32_t> tokens,
                 std::span<const std::string> extra_keys) {
  return Sha256Of(MessageOf(previous, tokens, extra_keys));
}

std::string HexOf(std::span<const std::uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  hex.reserve(bytes.size() * 2);
  for (const std::uint8_t byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

GrainChain::GrainChain(std::int32_t prefix_granularity, std::vector<std::string> extra_keys)
    : prefix_granularity_(prefix_granularity), extra_keys_(std::move(extra_keys)) {}

void GrainChain::ExtendTo(std::span<const std::int32_t> tokens, std::int32_t num_grains) {
  const auto grain_tokens = static_cast<std::size_t>(prefix_granularity_);
  const auto wanted = static_cast<std::size_t>(num_grains);
  if (digests_.size() >= wanted) {
    return;
  }
  digests_.reserve(wanted);
  while (digests_.size() < wanted) {
    digests_.push_back(HashNext(tokens.subspan(digests_.size() * grain_tokens, grain_tokens)));
  }
}

Digest GrainChain::HashNext(std::span<const std::int32_t> grain) {
  if (digests_.empty()) {
    return HashGrain({}, grain, extra_keys_);
  }
  const Digest& previous = digests_.back();
  if (message_.empty()) {
    message_ = MessageOf(previous, grain, extra_keys_);
    PadForSha256(message_);
  }
  std::copy(previous.begin(), previous.end(), message_.begin() + kCountBytes);
  std::memcpy(message_.data() + 2 * kCountBytes + previous.size(), grain.data(), grain.size_bytes());
  return Sha256OfPadded(message_);
}

}  // namespace pdmesh
