// Python face of the receiver-fenced data planes and of the checksums: converts, releases the interpreter
// lock, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "digest_variants.h"
#include "grant_table.h"
#include "receiver.h"
#include "run_check.h"
#include "sender.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::transfer {
namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using Runs = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Spans = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
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

// The rows of a table as they lie in the array.
template <class Row, class Table>
std::span<const Row> view_rows(const Table& table) {
  static_assert(sizeof(Row) % sizeof(std::int64_t) == 0);
  return {reinterpret_cast<const Row*>(table.data()), table.shape(0)};
}

// Rows of a table of non-negative numbers. Throws std::invalid_argument for others.
template <class Row, class Table>
std::vector<Row> to_rows(const Table& table) {
  const std::int64_t* begin = table.data();
  const std::int64_t* end = begin + table.size();
  if (std::any_of(begin, end, [](std::int64_t value) { return value < 0; })) {
    throw std::invalid_argument("a table of addresses and lengths has a negative number");
  }
  const std::span<const Row> rows = view_rows<Row>(table);
  return {rows.begin(), rows.end()};
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

// 8 bytes per digest, little-endian.
nb::bytes to_bytes(const std::vector<std::uint64_t>& digests) {
  static_assert(std::endian::native == std::endian::little);
  return nb::bytes(reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof(std::uint64_t));
}

nb::bytes digest_blocks(const Addresses& begins, const Spans& extents, std::string_view kind,
                        std::string_view instruction_set) {
  const auto addresses = view_rows<std::uint64_t>(begins);
  const std::vector<Extent> parts = to_rows<Extent>(extents);
  const DigestCore core = choose_digest_core(to_digest_kind(kind), instruction_set);
  std::vector<std::uint64_t> digests(addresses.size());
  {
    const nb::gil_scoped_release released;
    core(addresses, parts, digests);
  }
  return to_bytes(digests);
}

nb::bytes digest_span_table(const Spans& table, std::string_view kind) {
  const auto spans = view_rows<Span>(table);
  const DigestCore core = choose_digest_core(to_digest_kind(kind));
  std::vector<std::uint64_t> digests(spans.size());
  {
    const nb::gil_scoped_release released;
    for (std::size_t index = 0; index < spans.size(); ++index) digests[index] = digest_of(core, spans[index]);
  }
  return to_bytes(digests);
}

void bind_digests(nb::module_& module) {
  std::vector<std::string> kinds;
  std::vector<std::tuple<std::string, std::string>> variants;
  for (const DigestKind kind : runnable_digest_kinds()) {
    kinds.emplace_back(name_of(kind));
    for (const DigestVariant& variant : runnable_digest_variants(kind))
      variants.emplace_back(name_of(kind), variant.name);
  }
  module.attr("DIGEST_KINDS") = nb::tuple(nb::cast(kinds));
  module.attr("DIGEST_VARIANTS") = nb::tuple(nb::cast(variants));
  module.def("digest_spans", &digest_span_table, "spans"_a, "kind"_a);
  module.def("digest_blocks", &digest_blocks, "begins"_a, "extents"_a, "kind"_a, "instruction_set"_a = "");
}

std::tuple<RunFault, std::size_t, std::size_t> check_run_table(const Runs& runs, const Spans& sources,
                                                               const Spans& targets) {
  const nb::gil_scoped_release released;
  const RunVerdict verdict =
      check_runs(view_rows<Piece>(runs), view_rows<Span>(sources), view_rows<Span>(targets));
  return {verdict.fault, verdict.first, verdict.second};
}

void bind_runs(nb::module_& module) {
  nb::enum_<RunFault>(module, "RunFault")
      .value("NONE", RunFault::kNone)
      .value("MALFORMED", RunFault::kMalformed)
      .value("SOURCE_OUTSIDE", RunFault::kSourceOutside)
      .value("TARGET_OUTSIDE", RunFault::kTargetOutside)
      .value("WRITTEN_TWICE", RunFault::kWrittenTwice);
  module.def("pack_runs", &pack_runs, "runs"_a);
  module.def("copy_runs", &copy_runs, "runs"_a);
  module.def("check_runs", &check_run_table, "runs"_a, "sources"_a, "targets"_a);
}

// A grant and how to end it.
class Permit {
 public:
  Permit(std::shared_ptr<GrantTable> table, const Key& key, std::vector<Span> spans,
         std::optional<DigestKind> hashed_as)
      : table_(std::move(table)), key_(key), grant_(table_->allow(key, std::move(spans), hashed_as)) {}

  void revoke() { table_->revoke(key_, grant_); }
  const Grant& grant() const { return *grant_; }

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
  nb::class_<Permit>(module, "NativePermit")
      .def("revoke", &Permit::revoke, Released())
      .def(
          "digests",
          [](const Permit& self, const Spans& blocks, std::string_view kind) {
            const auto spans = view_rows<Span>(blocks);
            const DigestKind wanted = to_digest_kind(kind);
            std::vector<std::uint64_t> digests(spans.size());
            {
              const nb::gil_scoped_release released;
              self.grant().digest(wanted, spans, digests);
            }
            return to_bytes(digests);
          },
          "blocks"_a, "kind"_a)
      .def_prop_ro("num_hashed_blocks", [](const Permit& self) { return self.grant().num_hashed_spans(); });
  nb::class_<GrantTable>(module, "GrantTable")
      .def(nb::init<>())
      .def(
          "allow",
          [](std::shared_ptr<GrantTable> self, const nb::bytes& key, const Spans& spans,
             std::optional<std::string_view> hashed_as) {
            return Permit(std::move(self), to_key(key), to_rows<Span>(spans),
                          hashed_as ? std::optional(to_digest_kind(*hashed_as)) : std::nullopt);
          },
          "key"_a, "spans"_a, "hashed_as"_a = nb::none())
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
      .def_ro("was_begun", &Ending::was_begun)
      .def_prop_ro("digests", [](const Ending& ending) { return to_bytes(ending.digests); })
      .def_prop_ro("refused_address", [](const Ending& ending) { return ending.first_refused.target; })
      .def_prop_ro("refused_bytes", [](const Ending& ending) { return ending.first_refused.num_bytes; });
  nb::class_<Sender>(module, "Sender")
      .def(nb::init<int, bool, double>(), "descriptor"_a, "is_shared"_a, "progress_timeout_s"_a)
      .def(
          "post",
          [](Sender& self, std::uint64_t ticket, const nb::bytes& key, const Runs& runs, double timeout_s,
             const Spans& blocks, std::string_view kind) {
            self.post(ticket, to_key(key), to_rows<Piece>(runs), timeout_s, view_rows<Span>(blocks),
                      to_digest_kind(kind));
          },
          "ticket"_a, "key"_a, "runs"_a, "timeout_s"_a, "blocks"_a, "kind"_a)
      .def("give_up", &Sender::give_up, "ticket"_a)
      .def("close", &Sender::close)
      .def("drive", &Sender::drive, "max_wait_s"_a, Released())
      .def_prop_ro("failure", &Sender::failure);
}

}  // namespace
}  // namespace pdmesh::transfer

NB_MODULE(_native, module) {
  module.attr("KEY_BYTES") = pdmesh::transfer::kKeyBytes;
  pdmesh::transfer::bind_runs(module);
  pdmesh::transfer::bind_digests(module);
  pdmesh::transfer::bind_grants(module);
  pdmesh::transfer::bind_receiver(module);
  pdmesh::transfer::bind_sender(module);
}
