#include "digest_variants.h"

#include <stdexcept>

namespace pdmesh::transfer {

std::vector<DigestVariant> runnable_digest_variants() {
  std::vector<DigestVariant> found;
#ifdef PDMESH_HAS_AVX512
  if (__builtin_cpu_supports("avx512f")) found.push_back({"avx512", avx512::digest_core()});
#endif
#ifdef PDMESH_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", avx2::digest_core()});
#endif
  found.push_back({"baseline", baseline::digest_core()});
  return found;
}

DigestCore choose_digest_core(std::string_view name) {
  for (const DigestVariant& variant : runnable_digest_variants()) {
    if (name.empty() || name == variant.name) return variant.core;
  }
  throw std::invalid_argument("instruction set \"" + std::string(name) + "\" does not run on this CPU");
}

}  // namespace pdmesh::transfer
