// RequestSpec: what a caller submits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pdmesh {

struct RequestSpec {
  std::string request_id;
  std::vector<std::int32_t> tokens;
  std::optional<std::int32_t> max_new_tokens;  // undeclared: until the runtime finds the end
  std::vector<std::string> extra_keys;         // part of every grain's identity (adapter, salt)
  bool local_prefill = false;                  // decode role: computed here, needs no ready
};

}  // namespace pdmesh
