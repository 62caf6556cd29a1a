// Python face of the receiver-fenced data planes: converts, releases the interpreter lock, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "grant_table.h"
#include "receiver.h"
#include "sender.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::transfer {
namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using NewRuns = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 3>>;

Key to_key(const nb::bytes& bytes) {
  if (bytes.size() != kKeyBytes) {
    throw std::invalid_argument("key: " + std::to_string(bytes.size()) + " bytes given, " +
                                std::to_string(kKeyBytes) + " required");
  }
  Key key;
  std::memcpy(key.data(), bytes.c_str(), kKeyBytes);
  return key;
}

// Rows of a table of non-negative numbers. Throws std::invalid_argument for others.
template <class Row, class Table>
std::vector<Row> to_rows(const Table& table) {
  const std::int64_t* begin = table.data();
  const std::int64_t* end = begin + table.size();
  if (std::any_of(begin, end, [](std::int64_t value) { return value < 0; })) {
    throw std::invalid_argument("a table of addresses and lengths has a negative number");
  }
  std::vector<Row> rows(table.shape(0));
  static_assert(sizeof(Row) % sizeof(std::int64_t) == 0);
  std::memcpy(rows.data(), begin, rows.size() * sizeof(Row));
  return rows;
}

std::int64_t to_int64(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// int64[num_runs, 3] of a sequence of triples.
NewRuns pack_runs(const nb::sequence& runs) {
  const auto fast = nb::steal<nb::object>(PySequence_Fast(runs.ptr(), "runs must be a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const auto num_runs = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  auto table = std::make_unique<std::int64_t[]>(3 * num_runs);
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  for (std::size_t index = 0; index < num_runs; ++index) {
    PyObject* run = items[index];
    if (!PyTuple_Check(run) || PyTuple_GET_SIZE(run) != 3)
      throw nb::type_error("a run is a tuple of three numbers");
    for (Py_ssize_t column = 0; column < 3; ++column) {
      table[3 * index + static_cast<std::size_t>(column)] = to_int64(PyTuple_GET_ITEM(run, column));
    }
  }
  std::int64_t* data = table.release();
  nb::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
  return NewRuns(data, {num_runs, 3}, owner);
}

void copy_runs(const Runs& runs) {
  const std::vector<Piece> pieces = to_rows<Piece>(runs);
  const nb::gil_scoped_release released;
  for (const Piece& piece : pieces) {
    std::memcpy(reinterpret_cast<void*>(piece.target), reinterpret_cast<const void*>(piece.source),
                piece.num_bytes);
  }
}

// A grant and how to end it.
class Permit {
 public:
  Permit(std::shared_ptr<GrantTable> table, const Key& key, std::vector<Span> spans)
      : table_(std::move(table)), key_(key), grant_(table_->allow(key, std::move(spans))) {}

  void revoke() { table_->revoke(key_, grant_); }

 private:
  std::shared_ptr<GrantTable> table_;
  Key key_;
  std::shared_ptr<Grant> grant_;
};

std::vector<SharedSource> to_sources(
    const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& rows) {
  std::vector<SharedSource> sources;
  for (const auto& [peer_address, num_bytes, here] : rows) {
    if (peer_address + num_bytes > kMaxAddress)
      throw std::invalid_argument("sources: a region ends above 2**62");
    sources.push_back({peer_address, num_bytes, reinterpret_cast<const std::byte*>(here)});
  }
  return sources;
}

void bind_grants(nb::module_& module) {
  nb::class_<Permit>(module, "NativePermit").def("revoke", &Permit::revoke, Released());
  nb::class_<GrantTable>(module, "GrantTable")
      .def(nb::init<>())
      .def(
          "allow",
          [](std::shared_ptr<GrantTable> self, const nb::bytes& key, const Spans& spans) {
            return Permit(std::move(self), to_key(key), to_rows<Span>(spans));
          },
          "key"_a, "spans"_a)
      .def("close", &GrantTable::close, Released())
      .def_prop_ro("num_refused_pieces", &GrantTable::num_refused_pieces)
      .def_prop_ro("num_placed_bytes", &GrantTable::num_placed_bytes);
}

void bind_receiver(nb::module_& module) {
  nb::class_<Receiver>(module, "Receiver")
      .def(
          "__init__",
          [](Receiver* self, std::shared_ptr<GrantTable> grants, int descriptor, bool is_shared,
             const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& sources) {
            new (self) Receiver(std::move(grants), descriptor, is_shared, to_sources(sources));
          },
          "grants"_a, "descriptor"_a, "is_shared"_a, "sources"_a)
      .def("serve", &Receiver::serve, Released());
}

void bind_sender(nb::module_& module) {
  nb::enum_<Outcome>(module, "Outcome")
      .value("LANDED", Outcome::kLanded)
      .value("REFUSED", Outcome::kRefused)
      .value("TIMED_OUT", Outcome::kTimedOut)
      .value("GIVEN_UP", Outcome::kGivenUp)
      .value("FAILED", Outcome::kFailed);
  nb::class_<Ending>(module, "Ending")
      .def_ro("ticket", &Ending::ticket)
      .def_ro("outcome", &Ending::outcome)
      .def_ro("num_landed_bytes", &Ending::num_landed_bytes)
      .def_ro("num_refused_pieces", &Ending::num_refused_pieces)
      .def_prop_ro("refused_address", [](const Ending& ending) { return ending.first_refused.target; })
      .def_prop_ro("refused_bytes", [](const Ending& ending) { return ending.first_refused.num_bytes; });
  nb::class_<Sender>(module, "Sender")
      .def(nb::init<int, bool, double>(), "descriptor"_a, "is_shared"_a, "progress_timeout_s"_a)
      .def(
          "post",
          [](Sender& self, std::uint64_t ticket, const nb::bytes& key, const Runs& runs, double timeout_s) {
            self.post(ticket, to_key(key), to_rows<Piece>(runs), timeout_s);
          },
          "ticket"_a, "key"_a, "runs"_a, "timeout_s"_a)
      .def("give_up", &Sender::give_up, "ticket"_a)
      .def("close", &Sender::close)
      .def("drive", &Sender::drive, "max_wait_s"_a, Released())
      .def_prop_ro("failure", &Sender::failure);
}

}  // namespace
}  // namespace pdmesh::transfer

NB_MODULE(_native, module) {
  module.attr("KEY_BYTES") = pdmesh::transfer::kKeyBytes;
  module.def("pack_runs", &pdmesh::transfer::pack_runs, "runs"_a);
  module.def("copy_runs", &pdmesh::transfer::copy_runs, "runs"_a);
  pdmesh::transfer::bind_grants(module);
  pdmesh::transfer::bind_receiver(module);
  pdmesh::transfer::bind_sender(module);
}
