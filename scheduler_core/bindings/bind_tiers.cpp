#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "bindings.h"
#include "cache/prefix/prefix_hasher.h"
#include "scheduler/plan.h"

namespace pdmesh::bindings {

using namespace nb::literals;

namespace {

using Flags = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;
using Copies = nb::ndarray<nb::numpy, const std::int32_t, nb::shape<-1, 3>, nb::c_contig>;

void InitKey(CacheKey* self, std::int32_t group, const nb::bytes& digest, std::int32_t grain_offset) {
  CacheKey key{.name_space = 0, .group = group, .digest = {}, .grain_offset = grain_offset};
  if (digest.size() != key.digest.size()) {
    throw nb::value_error(("digest must have 32 bytes, got " + std::to_string(digest.size())).c_str());
  }
  std::memcpy(key.digest.data(), digest.data(), key.digest.size());
  new (self) CacheKey(key);
}

void BindKey(nb::module_& module) {
  nb::class_<CacheKey>(module, "StorageKey", "What a block holds, whatever tier it lies on.")
      .def("__init__", &InitKey, nb::kw_only(), "group"_a, "digest"_a, "grain_offset"_a)
      .def_ro("group", &CacheKey::group)
      .def_prop_ro(
          "digest",
          [](const CacheKey& key) {
            return nb::bytes(reinterpret_cast<const char*>(key.digest.data()), key.digest.size());
          },
          "32 bytes: the grain the block lies in")
      .def_ro("grain_offset", &CacheKey::grain_offset, "which of the grain's blocks it is")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__", [](const CacheKey& key) { return CacheKeyHash()(key); })
      .def("__repr__", [](const CacheKey& key) {
        return "StorageKey(group=" + std::to_string(key.group) + ", digest=bytes.fromhex(\"" +
               HexOf(key.digest) + "\"), grain_offset=" + std::to_string(key.grain_offset) + ")";
      });
}

template <typename Operation>
nb::class_<Operation> BindOperation(nb::module_& module, const char* name, const char* doc) {
  return nb::class_<Operation>(module, name, doc)
      .def_prop_ro(
          "operation_id", [](const Operation& operation) { return operation.operation_id; },
          "rises, never used again")
      .def_prop_ro(
          "copies",
          [](nb::handle_t<Operation> self) {
            const std::vector<std::int32_t>& copies = ValueOf<Operation>(self).copies;
            return Copies(copies.data(), {copies.size() / 3, 3}, self);
          },
          "int32[num_copies, 3]: group, source block id, destination block id; group by group")
      .def_prop_ro(
          "keys", [](const Operation& operation) { return operation.keys; },
          "per copy: what the blocks hold");
}

void BindTransferEvents(nb::module_& module) {
  nb::class_<StoreDoneEvent>(
      module, "StoreDoneEvent",
      "The copies of a store are done and, with storage, backed up; created are the keys that storage did "
      "not have before.")
      .def(
          "__init__",
          [](StoreDoneEvent* self, std::uint64_t operation_id, std::vector<CacheKey> created) {
            new (self) StoreDoneEvent{.operation_id = operation_id, .created = std::move(created)};
          },
          "operation_id"_a, "created"_a = std::vector<CacheKey>())
      .def_ro("operation_id", &StoreDoneEvent::operation_id)
      .def_ro("created", &StoreDoneEvent::created);
  nb::class_<LoadDoneEvent>(
      module, "LoadDoneEvent",
      "The copies of a load are done. Without success nothing of it was copied and the rows of its plan were "
      "not run: reported before the next plan is asked for and behind the results of earlier plans; missed "
      "are the keys that storage did not have.")
      .def(
          "__init__",
          [](LoadDoneEvent* self, std::uint64_t operation_id, bool success, std::vector<CacheKey> missed) {
            new (self)
                LoadDoneEvent{.operation_id = operation_id, .success = success, .missed = std::move(missed)};
          },
          "operation_id"_a, "success"_a = true, "missed"_a = std::vector<CacheKey>())
      .def_ro("operation_id", &LoadDoneEvent::operation_id)
      .def_ro("success", &LoadDoneEvent::success)
      .def_ro("missed", &LoadDoneEvent::missed);
}

}  // namespace

void BindTiers(nb::module_& module) {
  BindKey(module);
  BindOperation<StoreOperation>(module, "StoreOperation", "Blocks to copy from the device to the host.")
      .def_ro("is_pinned", &StoreOperation::is_pinned,
              "nobody writes to the sources before StoreDoneEvent; if not, the plan itself may grant them to "
              "others and the copies go before everything else");
  BindOperation<LoadOperation>(module, "LoadOperation", "Blocks to copy from the host to the device.")
      .def_prop_ro(
          "reads_storage",
          [](nb::handle_t<LoadOperation> self) {
            const std::vector<std::uint8_t>& flags = ValueOf<LoadOperation>(self).reads_storage;
            return Flags(flags.data(), {flags.size()}, self);
          },
          "uint8[num_copies], 1 where the source is read from storage first");
  BindTransferEvents(module);
}

}  // namespace pdmesh::bindings
