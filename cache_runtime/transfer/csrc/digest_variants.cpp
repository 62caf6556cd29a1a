#include "digest_variants.h"

#include <stdexcept>

namespace pdmesh::transfer {
namespace {

constexpr DigestKind kKinds[] = {DigestKind::kAes16, DigestKind::kXxh3};

void add_xxh3(std::vector<DigestVariant>& found) {
#ifdef PDMESH_HAS_AVX512
  if (__builtin_cpu_supports("avx512f")) found.push_back({"avx512", avx512::digest_core()});
#endif
#ifdef PDMESH_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", avx2::digest_core()});
#endif
  found.push_back({"baseline", baseline::digest_core()});
}

void add_aes16([[maybe_unused]] std::vector<DigestVariant>& found) {
#ifdef PDMESH_HAS_VAES512
  const bool has_vaes = __builtin_cpu_supports("vaes");
  if (has_vaes && __builtin_cpu_supports("avx512f")) found.push_back({"vaes512", vaes512::digest_core()});
  if (has_vaes && __builtin_cpu_supports("avx2")) found.push_back({"vaes256", vaes256::digest_core()});
  if (__builtin_cpu_supports("aes") && __builtin_cpu_supports("avx")) {
    found.push_back({"aesni", aesni::digest_core()});
  }
#endif
}

}  // namespace

std::string_view name_of(DigestKind kind) {
  return kind == DigestKind::kXxh3 ? "xxh3" : "aes16";
}

DigestKind to_digest_kind(std::string_view name) {
  for (const DigestKind kind : kKinds) {
    if (name == name_of(kind)) return kind;
  }
  throw std::invalid_argument("digest kind \"" + std::string(name) + "\" is not known");
}

std::vector<DigestKind> runnable_digest_kinds() {
  std::vector<DigestKind> found;
  for (const DigestKind kind : kKinds) {
    if (!runnable_digest_variants(kind).empty()) found.push_back(kind);
  }
  return found;
}

std::vector<DigestVariant> runnable_digest_variants(DigestKind kind) {
  std::vector<DigestVariant> found;
  kind == DigestKind::kXxh3 ? add_xxh3(found) : add_aes16(found);
  return found;
}

DigestCore choose_digest_core(DigestKind kind, std::string_view name) {
  for (const DigestVariant& variant : runnable_digest_variants(kind)) {
    if (name.empty() || name == variant.name) return variant.core;
  }
  const std::string set = name.empty() ? "of any" : "\"" + std::string(name) + "\"";
  throw std::invalid_argument("instruction set " + set + " for digests of kind \"" +
                              std::string(name_of(kind)) + "\" does not run on this CPU");
}

}  // namespace pdmesh::transfer
