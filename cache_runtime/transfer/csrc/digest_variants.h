// The choice among the instruction sets that hashing was compiled for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "digest_core.h"

namespace pdmesh::transfer {

struct DigestVariant {
  const char* name;
  DigestCore core;
};

// What this CPU can run, best first; never empty.
std::vector<DigestVariant> runnable_digest_variants();

// The best for an empty name. Throws std::invalid_argument for one that this CPU cannot run.
DigestCore choose_digest_core(std::string_view name = "");

}  // namespace pdmesh::transfer
