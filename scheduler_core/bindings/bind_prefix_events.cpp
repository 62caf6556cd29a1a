#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "scheduler/prefix_events.h"
#include "scheduler/prefix_keys.h"

namespace pdmesh::bindings {

void BindPrefixEvents(nb::module_& module) {
  nb::class_<PrefixStored>(module, "PrefixStored",
                           "A grain of a prompt is in the device cache, for every group that is matched.")
      .def_ro(
          "hash", &PrefixStored::hash,
          "64-bit FNV-1a over, little-endian: u8 1 if there is a parent, else 0; u64 parent hash if there "
          "is one; u64 number of tokens; i32 per token")
      .def_ro("parent_hash", &PrefixStored::parent_hash, "None for the first grain of a prompt")
      .def_prop_ro(
          "tokens",
          [](nb::handle_t<PrefixStored> self) { return ViewOf(ValueOf<PrefixStored>(self).tokens, self); },
          "int32[prefix_granularity], of this grain alone")
      .def_ro("prefix_granularity", &PrefixStored::prefix_granularity);
  nb::class_<PrefixRemoved>(module, "PrefixRemoved",
                            "A stored grain is not whole in the device cache any more.")
      .def_ro("hash", &PrefixRemoved::hash);
  nb::class_<PrefixCleared>(module, "PrefixCleared",
                            "The cache was cleared; all that was stored before is gone.");
  nb::class_<PrefixKeyChanges>(module, "PrefixKeyChanges",
                               "How the set of keys of cached prefixes changed; applied in this order.")
      .def_ro("is_cleared", &PrefixKeyChanges::is_cleared, "All that was stored before is gone.")
      .def_ro("removed", &PrefixKeyChanges::removed)
      .def_ro("stored", &PrefixKeyChanges::stored, "Of one prompt its front first.")
      .def("__bool__", [](const PrefixKeyChanges& changes) {
        return changes.is_cleared || !changes.removed.empty() || !changes.stored.empty();
      });
}

nb::object ObjectOf(PrefixEvent&& event) {
  return std::visit([](auto& value) { return nb::cast(std::move(value)); }, event);
}

}  // namespace pdmesh::bindings
