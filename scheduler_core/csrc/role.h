// The role of a scheduler in the mesh.
#pragma once

#include <cstdint>

namespace pdmesh {

enum class Role : std::uint8_t {
  kPrefill,  // computes prompts and hands their blocks over
  kDecode,   // has prompts filled by a peer and generates
  kFused,    // does both in one place
};

constexpr const char* NameOf(Role role) {
  switch (role) {
    case Role::kPrefill:
      return "prefill";
    case Role::kDecode:
      return "decode";
    case Role::kFused:
      return "fused";
  }
  return "unknown";
}

}  // namespace pdmesh
