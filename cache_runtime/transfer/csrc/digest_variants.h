// The choice among the kinds of digests and the instruction sets that each was compiled for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "digest_core.h"

namespace pdmesh::transfer {

enum class DigestKind { kXxh3, kAes16 };

struct DigestVariant {
  const char* name;
  DigestCore core;
};

// As peers name it to each other.
std::string_view name_of(DigestKind kind);

// Throws std::invalid_argument for a name that is no kind's.
DigestKind to_digest_kind(std::string_view name);

// Those that this CPU can take, the fastest first; the last is XXH3.
std::vector<DigestKind> runnable_digest_kinds();

// The instruction sets of which this CPU can run the one for `kind`, best first; never empty for XXH3.
std::vector<DigestVariant> runnable_digest_variants(DigestKind kind);

// The best for an empty name. Throws std::invalid_argument for one that this CPU cannot run.
DigestCore choose_digest_core(DigestKind kind, std::string_view name = "");

}  // namespace pdmesh::transfer
