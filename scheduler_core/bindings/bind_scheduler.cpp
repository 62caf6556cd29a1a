#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings.h"
#include "cache/prefix/prefix_hasher.h"
#include "scheduler/prefix_keys.h"
#include "scheduler/scheduler.h"

namespace pdmesh::bindings {

using namespace nb::literals;

namespace {

using TokenArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteKeys = std::vector<nb::bytes>;

std::vector<std::string> KeysOf(const ByteKeys& keys) {
  std::vector<std::string> strings;
  for (const nb::bytes& key : keys) {
    strings.emplace_back(key.c_str(), key.size());
  }
  return strings;
}

std::vector<std::int32_t> TokensOf(const TokenArray& tokens) {
  return {tokens.data(), tokens.data() + tokens.size()};
}

void InitSpec(RequestSpec* self, std::string request_id, std::vector<std::int32_t> tokens,
              std::optional<std::int32_t> max_new_tokens, const ByteKeys& extra_keys, bool local_prefill) {
  new (self) RequestSpec{.request_id = std::move(request_id),
                         .tokens = std::move(tokens),
                         .max_new_tokens = max_new_tokens,
                         .extra_keys = KeysOf(extra_keys),
                         .local_prefill = local_prefill};
}

void BindSpec(nb::module_& module) {
  nb::class_<RequestSpec>(module, "RequestSpec", "What a caller submits.")
      .def(
          "__init__",
          [](RequestSpec* self, std::string request_id, const TokenArray& tokens,
             std::optional<std::int32_t> max_new_tokens, const ByteKeys& extra_keys, bool local_prefill) {
            InitSpec(self, std::move(request_id), TokensOf(tokens), max_new_tokens, extra_keys,
                     local_prefill);
          },
          nb::kw_only(), "request_id"_a, "tokens"_a.noconvert(), "max_new_tokens"_a = nb::none(),
          "extra_keys"_a = ByteKeys(), "local_prefill"_a = false)
      .def("__init__", &InitSpec, nb::kw_only(), "request_id"_a, "tokens"_a, "max_new_tokens"_a = nb::none(),
           "extra_keys"_a = ByteKeys(), "local_prefill"_a = false)
      .def_ro("request_id", &RequestSpec::request_id)
      .def_prop_ro(
          "tokens",
          [](nb::handle_t<RequestSpec> self) { return ViewOf(ValueOf<RequestSpec>(self).tokens, self); })
      .def_ro("max_new_tokens", &RequestSpec::max_new_tokens, "None: undeclared")
      .def_prop_ro("extra_keys",
                   [](const RequestSpec& self) {
                     ByteKeys keys;
                     for (const std::string& key : self.extra_keys) {
                       keys.push_back(nb::bytes(key.data(), key.size()));
                     }
                     return keys;
                   })
      .def_ro("local_prefill", &RequestSpec::local_prefill);
}

void BindCapacity(nb::module_& module) {
  nb::class_<GroupOccupancy>(
      module, "GroupOccupancy",
      "What one group has of the parents of the device; an empty parent belongs to no group.")
      .def_ro("lcm_blocks", &GroupOccupancy::lcm_blocks)
      .def_ro("cached_lcm_blocks", &GroupOccupancy::cached_lcm_blocks, "held by the prefix cache alone")
      .def_ro("taken_blocks", &GroupOccupancy::taken_blocks, "cache blocks that somebody holds");
  nb::class_<Capacity>(
      module, "Capacity",
      "Gauges. Each parent is in exactly one of the four block counts of its tier; 0 without a host tier.")
      .def_ro("total_lcm_blocks", &Capacity::total_lcm_blocks)
      .def_ro("empty_lcm_blocks", &Capacity::empty_lcm_blocks)
      .def_ro("active_lcm_blocks", &Capacity::active_lcm_blocks)
      .def_ro("cached_lcm_blocks", &Capacity::cached_lcm_blocks)
      .def_ro("quarantined_lcm_blocks", &Capacity::quarantined_lcm_blocks)
      .def_ro("num_waiting", &Capacity::num_waiting)
      .def_ro("num_running", &Capacity::num_running)
      .def_ro("num_live_requests", &Capacity::num_live_requests)
      .def_ro("groups", &Capacity::groups, "in the order of the configuration")
      .def_prop_ro("total_host_lcm_blocks",
                   [](const Capacity& gauges) { return gauges.host.total_lcm_blocks; })
      .def_prop_ro("empty_host_lcm_blocks",
                   [](const Capacity& gauges) { return gauges.host.empty_lcm_blocks; })
      .def_prop_ro(
          "active_host_lcm_blocks", [](const Capacity& gauges) { return gauges.host.active_lcm_blocks; },
          "a transfer reads or writes there")
      .def_prop_ro("cached_host_lcm_blocks",
                   [](const Capacity& gauges) { return gauges.host.cached_lcm_blocks; });
}

void Advance(Scheduler& scheduler, nb::sequence events) {
  const nb::list held(events);
  std::vector<AnyEventView> views;
  views.reserve(held.size());
  for (const nb::handle event : held) {
    views.push_back(EventViewOf(event));
  }
  scheduler.Advance(views);
}

// Of the full grains of a prompt.
GrainChain ChainOf(std::span<const std::int32_t> tokens, std::int32_t prefix_granularity,
                   const ByteKeys& extra_keys) {
  if (prefix_granularity < 1) {
    throw nb::value_error("prefix_granularity must be at least 1");
  }
  GrainChain chain(prefix_granularity, KeysOf(extra_keys));
  chain.ExtendTo(tokens,
                 static_cast<std::int32_t>(tokens.size() / static_cast<std::size_t>(prefix_granularity)));
  return chain;
}

nb::typed<nb::list, nb::bytes> HashGrains(std::span<const std::int32_t> tokens,
                                          std::int32_t prefix_granularity, const ByteKeys& extra_keys) {
  const GrainChain chain = ChainOf(tokens, prefix_granularity, extra_keys);
  nb::typed<nb::list, nb::bytes> digests;
  for (const Digest& digest : chain.digests()) {
    digests.append(nb::bytes(digest.data(), digest.size()));
  }
  return digests;
}

}  // namespace

void BindScheduler(nb::module_& module) {
  BindSpec(module);
  BindCapacity(module);
  module.def(
      "hash_grains",
      [](const TokenArray& tokens, std::int32_t prefix_granularity, const ByteKeys& extra_keys) {
        return HashGrains({tokens.data(), tokens.size()}, prefix_granularity, extra_keys);
      },
      "tokens"_a.noconvert(), "prefix_granularity"_a, "extra_keys"_a = ByteKeys(),
      "The chained SHA-256 digests of the full grains of a prompt: 32 raw bytes each.");
  module.def(
      "hash_grains",
      [](const std::vector<std::int32_t>& tokens, std::int32_t prefix_granularity,
         const ByteKeys& extra_keys) { return HashGrains(tokens, prefix_granularity, extra_keys); },
      "tokens"_a, "prefix_granularity"_a, "extra_keys"_a = ByteKeys());
  module.def(
      "prefix_keys",
      [](const TokenArray& tokens, std::int32_t prefix_granularity, const ByteKeys& extra_keys) {
        std::vector<std::uint64_t> keys;
        const GrainChain chain = ChainOf({tokens.data(), tokens.size()}, prefix_granularity, extra_keys);
        for (const Digest& digest : chain.digests()) {
          keys.push_back(PrefixKeyOf(digest));
        }
        return keys;
      },
      "tokens"_a.noconvert(), "prefix_granularity"_a, "extra_keys"_a = ByteKeys(),
      "The keys of the full grains of a prompt, as Scheduler.drain_prefix_keys tells them: 64-bit numbers.");
  nb::class_<Scheduler>(module, "Scheduler", "submit -> next_plan -> advance(events) -> next_plan ...")
      .def(nb::init<const SchedulerConfig&>(), "config"_a, "Raises ConfigError.")
      .def("submit", &Scheduler::Submit, "requests"_a,
           "Raises SubmitError naming the request and the limit; then none of the batch is accepted.")
      .def("advance", &Advance, "events"_a,
           nb::sig(
               "def advance(self, events: collections.abc.Sequence[ResultEvent | FinishEvent | AbortEvent | "
               "ReadyEvent | GrantedEvent | DoneEvent | HandedOverEvent | FailedEvent | QuiescedEvent | "
               "ReserveEvent | RetractEvent | StoreDoneEvent | LoadDoneEvent]) -> None"),
           "Applies events in order; those of requests that are not live change nothing. Raises "
           "ContractError when one "
           "breaks the agreement; then none of the batch is applied.")
      .def("next_plan", &Scheduler::NextPlan)
      .def(
          "block_tables",
          [](const Scheduler& scheduler, const std::string& request_id) {
            auto* tables = new std::vector<std::vector<std::int32_t>>(scheduler.BlockTablesOf(request_id));
            const nb::capsule owner(tables, [](void* held) noexcept {
              delete static_cast<std::vector<std::vector<std::int32_t>>*>(held);
            });
            return nb::typed<nb::list, Int32Array>(ViewsOf(*tables, owner));
          },
          "request_id"_a,
          "Per group int32[slots], 0 = hole; empty when the request holds no block. Raises ContractError for "
          "a request "
          "that is not live.")
      .def("capacity", &Scheduler::capacity)
      .def(
          "find_cached_tokens",
          [](const Scheduler& scheduler, const TokenArray& tokens, const ByteKeys& extra_keys) {
            return scheduler.FindCachedTokens({tokens.data(), tokens.size()}, KeysOf(extra_keys));
          },
          "tokens"_a.noconvert(), "extra_keys"_a = ByteKeys(),
          "How much of a prompt a local prefill would find in the cache now; changes nothing and promises "
          "nothing.")
      .def_prop_ro("max_request_tokens", &Scheduler::max_request_tokens,
                   "Bound of one request: prompt + completion; prompt + verify_width on the prefill role.")
      .def("can_clear", &Scheduler::CanClear,
           "Whether a clear would succeed: no request lives and no transfer is under way.")
      .def("clear_device_cache", &Scheduler::ClearDeviceCache,
           "Empties the prefix cache of the device; what the host has can be hit as before. False, with "
           "nothing changed, if can_clear is.")
      .def(
          "clear_cache", &Scheduler::ClearCache,
          "Empties the prefix cache on both tiers and forgets what storage has. False, with nothing changed, "
          "if can_clear is.")
      .def("storage_queries", &Scheduler::StorageQueries,
           "With storage: what it may be asked for before the next plan, of one prompt its front first. The "
           "answer promises nothing.")
      .def(
          "register_storage_keys",
          [](Scheduler& scheduler, const std::vector<CacheKey>& keys) {
            scheduler.RegisterStorageKeys(keys);
          },
          "keys"_a,
          "Storage has these keys, of one prompt its front first. Raises ContractError for a key that no "
          "block can have.")
      .def(
          "unregister_storage_keys",
          [](Scheduler& scheduler, const std::vector<CacheKey>& keys) {
            scheduler.UnregisterStorageKeys(keys);
          },
          "keys"_a, "Storage does not have them. Raises ContractError likewise.")
      .def("track_prefix_events", &Scheduler::TrackPrefixEvents, nb::kw_only(), "with_extra_keys"_a,
           "Announces cached prefixes from now on, as enable_prefix_events does from the beginning, on "
           "request "
           "without those of prompts with extra keys, which others never find. Raises ContractError once a "
           "request was submitted.")
      .def(
          "drain_prefix_events",
          [](Scheduler& scheduler) {
            nb::list events;
            for (PrefixEvent& event : scheduler.DrainPrefixEvents()) {
              events.append(ObjectOf(std::move(event)));
            }
            return events;
          },
          nb::sig("def drain_prefix_events(self) -> list[PrefixStored | PrefixRemoved | PrefixCleared]"),
          "How the set of cached prefixes changed since the last call: apply in order. Empty unless they are "
          "announced.")
      .def("track_prefix_keys", &Scheduler::TrackPrefixKeys,
           "Keeps track of the keys of cached prefixes from now on. Idempotent. Raises ContractError once a "
           "request was submitted.")
      .def("drain_prefix_keys", &Scheduler::DrainPrefixKeys,
           "How the set of keys of cached prefixes changed since the last call. Empty unless they are "
           "tracked.")
      .def("describe", &Scheduler::Describe, "A stable, line-oriented dump for people and transcripts.");
}

}  // namespace pdmesh::bindings
