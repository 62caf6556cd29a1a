// The Python face of the core, one function per type family. Translates values and holds no logic.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "fsm/events.h"
#include "scheduler/prefix_events.h"

namespace pdmesh::bindings {

namespace nb = nanobind;

using Int32Array = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>, nb::c_contig>;

// The C++ value of an object whose type was checked. An object made by __new__ alone has none.
template <typename Value>
const Value& ValueOf(nb::handle self) {
  if (!nb::inst_ready(self)) {
    throw nb::type_error("the object was never initialised");
  }
  return *nb::inst_ptr<Value>(self);
}

// A read-only view that keeps `owner` alive.
inline Int32Array ViewOf(const std::vector<std::int32_t>& values, nb::handle owner) {
  return Int32Array(values.data(), {values.size()}, owner);
}

inline nb::list ViewsOf(const std::vector<std::vector<std::int32_t>>& groups, nb::handle owner) {
  nb::list views;
  for (const std::vector<std::int32_t>& values : groups) {
    views.append(ViewOf(values, owner));
  }
  return views;
}

// Throws nanobind's TypeError when the object is no event.
AnyEventView EventViewOf(nb::handle event);

// The event as an object of its own class.
nb::object ObjectOf(PrefixEvent&& event);

void BindCapacityModel(nb::module_& module);
void BindConfig(nb::module_& module);
void BindEvents(nb::module_& module);
void BindPlan(nb::module_& module);
void BindPrefixEvents(nb::module_& module);
void BindScheduler(nb::module_& module);
void BindTiers(nb::module_& module);

}  // namespace pdmesh::bindings
