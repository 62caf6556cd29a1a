// RequestSpec: what a caller submits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pdmesh {

struct RequestSpec {
  std::string request_id;
  std::vector<std::int32_t> tokens;
  std::int32_t max_new_tokens;
  std::vector<std::string> extra_keys;  // part of every grain's identity (adapter, salt)
  bool local_prefill = false;           // decode role: computed here, needs no ready
};

}  // namespace pdmesh
