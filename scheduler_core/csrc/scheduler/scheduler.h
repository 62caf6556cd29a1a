// Scheduler: decides what a node computes next. submit -> next_plan -> advance(events) -> next_plan ...
//
// Pure: no I/O, clock, thread, randomness or log. The same configuration and the same calls give the same
// plans, byte for byte, in every process. It schedules in tokens; where blocks lie is the coordinator's
// business.
//
// Not thread-safe; one caller owns it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/coordinator/cache_coordinator.h"
#include "fsm/events.h"
#include "fsm/slot_pool.h"
#include "scheduler/capacity_model.h"
#include "scheduler/chunking.h"
#include "scheduler/config.h"
#include "scheduler/plan.h"
#include "scheduler/prefix_events.h"
#include "scheduler/prefix_keys.h"
#include "scheduler/request.h"
#include "scheduler/round.h"

namespace pdmesh {

// Each parent is in exactly one of the four; active includes blocks a transfer of an ended request still
// reads.
// What one group has of the device's parents. A parent that holds nothing belongs to no group.
struct GroupOccupancy {
  std::int32_t lcm_blocks;
  std::int32_t cached_lcm_blocks;  // those of them that the prefix cache alone holds
  std::int64_t taken_blocks;       // children that somebody holds
};

struct Capacity {
  std::int32_t total_lcm_blocks;
  std::int32_t empty_lcm_blocks;
  std::int32_t active_lcm_blocks;
  std::int32_t cached_lcm_blocks;       // held by the prefix cache alone
  std::int32_t quarantined_lcm_blocks;  // a peer may still write into them
  std::int32_t num_waiting;             // admitted to nothing yet, or retracted
  std::int32_t num_running;
  std::int32_t num_live_requests;  // waiting, running, or ended with blocks still held
  HostCapacity host;
  std::vector<GroupOccupancy> groups;  // in the order of the configuration
};

class Scheduler {
 public:
  // Throws ConfigError.
  explicit Scheduler(const SchedulerConfig& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Throws SubmitError naming the request and the limit; then none of the batch is accepted.
  void Submit(std::vector<RequestSpec> specs);

  // Applies events in order. Events of requests that are not live change nothing. Throws ContractError when
  // one breaks the agreement; then none of the batch is applied.
  void Advance(std::span<const AnyEventView> events);

  Plan NextPlan();

  // One id per slot and group; empty tables when the request holds none. Throws ContractError for unknown
  // requests.
  std::vector<std::vector<std::int32_t>> BlockTablesOf(const std::string& request_id) const;
  Capacity capacity() const;
  // How much of a prompt a local prefill would find in the cache now; a multiple of prefix_granularity. Looks
  // only: nothing is held, and the answer promises nothing.
  std::int32_t FindCachedTokens(std::span<const std::int32_t> tokens,
                                std::vector<std::string> extra_keys) const;
  std::int32_t max_request_tokens() const { return capacity_model_.max_request_tokens(); }

  // Whether a clear would succeed: no request lives and no transfer is under way.
  bool CanClear() const;
  // Empties the prefix cache of the device; what the host has can be hit as before. False, with nothing
  // changed, if CanClear() is.
  bool ClearDeviceCache();
  // Empties the prefix cache on both tiers and forgets what storage has. False likewise.
  bool ClearCache();

  // With storage: what it may be asked for before the next plan, front first. These are the blocks that
  // neither tier has of prompts that have a fair chance of a place and of memory in that plan; the answer
  // promises nothing.
  std::vector<CacheKey> StorageQueries();
  // Storage has these keys; of one prompt its front first. Throws ContractError for a key that no block can
  // have. Without storage they are not kept.
  void RegisterStorageKeys(std::span<const CacheKey> keys);
  void UnregisterStorageKeys(std::span<const CacheKey> keys);

  // Announces cached prefixes from now on, as the configuration can ask for from the beginning; on request
  // without those of prompts with extra keys, which others never find. Throws ContractError once a request
  // was submitted.
  void TrackPrefixEvents(bool with_extra_keys);
  // How the set of cached prefixes changed since the last drain, in the order in which to apply it. Always
  // empty unless they are announced.
  std::vector<PrefixEvent> DrainPrefixEvents();

  // Keeps track of the keys of cached prefixes from now on. Idempotent. Throws ContractError once a request
  // was submitted.
  void TrackPrefixKeys();
  // How the set of these keys changed since the last drain. Empty unless they are tracked.
  PrefixKeyChanges DrainPrefixKeys();

  // A stable, line-oriented dump for people and transcripts.
  std::string Describe() const;

 private:
  using RequestQueue = std::set<Request*, BySubmission>;
  enum class AdmitOutcome : std::uint8_t { kAdmitted, kBlocked, kNoRoom };

  // Submission.
  void CheckSpec(const RequestSpec& spec) const;

  // Events.
  struct JudgedEvent {
    Request* request;
    EventView event;
  };
  struct GivenUp {  // the rows of its plan were not run
    Request* request;
  };
  using JudgedChange = std::variant<JudgedEvent, GivenUp, TransferEventView>;
  std::vector<JudgedChange> JudgeEvents(std::span<const AnyEventView> events);
  void JudgeRequestEvent(const EventView& event, std::vector<JudgedChange>& to_apply);
  void JudgeFailedLoad(const LoadDoneEvent& failed, std::vector<JudgedChange>& to_apply);
  PhaseView& JudgedView(Request& request);
  void ApplyTransferEvent(const TransferEventView& event);
  void Apply(Request& request, const EventView& event);
  void ApplyResult(Request& request, const ResultEvent& result);
  void ApplyEarlyEnd(Request& request);
  void Finish(Request& request);

  // Rounds.
  void ListFinished(Round& round);
  void PlanHandovers(Round& round);
  void PlanFused(Round& round);
  bool HasPrefillToRun() const;
  // Leaves `num_spared_tokens` of the budget.
  void PlanDecodes(Round& round, std::int32_t num_spared_tokens);
  std::int32_t DecodeCostTokens() const;
  bool HasRoomForDecode(const Round& round, std::int32_t num_spared_tokens) const;
  void PlanPrefills(Round& round);
  bool PlanResidentChunks(Round& round);
  void PlanNewPrompts(Round& round);
  void PlanDecodeRole(Round& round);
  bool PlanOneLocalPrefill(Round& round);
  void PlanRemoteAdmissions(Round& round);
  bool AdmitRemote(Round& round, Request& request);
  Request* NextReadmission() const;
  bool PlanReadmission(Round& round);
  bool ReadmitsFirst() const;
  void StartTransfers(Round& round);
  struct PlanRoom {
    std::int64_t num_rows = 0;
    std::int64_t num_budget_tokens = 0;
    std::vector<GroupDemand> demands = {};  // of those that were given a row
  };
  std::vector<Request*> LikelyAdmissions() const;
  PlanRoom RoomForNewPrompts() const;
  bool CouldAdmitBeside(const Request& request, std::vector<GroupDemand>& demands) const;
  void CheckKeys(std::span<const CacheKey> keys) const;

  // Retraction.
  void ResolveBlocked(Round& round);
  bool FitsByNow(Round& round, Request& blocked);
  void MakeRoomFor(Round& round, Request& blocked);
  void MakeRoomAtLast(Round& round, Request& blocked);
  AdmitOutcome Grant(Round& round, Request& request);
  AdmitOutcome GrantPrompt(Round& round, Request& request);
  void GrantAfterGivingWay(Round& round);
  bool WouldFitWithoutQuarantine(Request& blocked);
  Request* NextVictim(bool includes_secured) const;
  bool IsQuiescent(const Request& request) const;
  void RetractVictim(Round& round, Request& victim);
  void GiveBlocksBack(Request& request);
  void NoteOvertaken(const Request& admitted);
  Request* TakeFirstInLine();
  bool IsAnythingOut() const;
  void CountStall(Plan& plan, bool has_work);

  // One request.
  bool PlanChunk(Round& round, Request& request);
  void NoteChunkPlanned(Request& request);
  bool CanTakeRow(const Request& request) const;
  std::int32_t DecodeWidth(const Request& request) const;
  std::int64_t DecodeGrowthTokens(const Request& request) const;
  std::int64_t DecodeRoomTokens(const Request& request) const;
  bool PlanDecodeRow(Round& round, Request& request);
  std::int32_t ChunkTokens(const Request& request, std::int32_t begin, std::int32_t num_budget_tokens,
                           std::int32_t promotion_tokens) const;
  PromptSpan SpanOf(const Request& request, std::int32_t begin, std::int32_t end, bool is_local,
                    std::int32_t replay_tokens = 0) const;
  std::int32_t ReplayTokens(std::int32_t hit_tokens) const;
  std::int32_t SparedTokens() const;
  void NoteComputed(const Request& request, Holdings& holdings, std::int32_t end, bool is_local) const;
  AdmitOutcome AdmitPrompt(Round& round, Request& request);
  void GrantRemote(Round& round, Request& request, const Holdings& holdings) const;
  std::optional<Holdings> AdmitFirst(Round& round, Request& request, bool is_local);
  std::int32_t FirstChunkTokens(const Round& round, const Request& request, const PrefixProbe& probe,
                                bool is_local) const;
  struct FirstAdmission {
    std::optional<Holdings> holdings;
    bool is_out_of_budget = false;  // the round has no use for the request behind the hit that can be had
  };
  FirstAdmission AdmitBehind(Round& round, Request& request, PrefixProbe probe, bool is_local);
  void NoteRestored(Request& request, const PrefixProbe& probe);
  void NoteBlockedPrompt(Round& round, Request& request) const;
  std::int64_t HeadroomTokens(const Request& request) const;
  std::vector<GroupDemand> LeastDemands(const Request& request, std::int32_t hit_tokens, bool is_local) const;
  PrefixProbe Probe(Request& request, bool is_local);
  bool IsStillBlocked(const Request& request, bool is_local, std::int32_t num_budget_tokens) const;
  bool MayJoin(const Round& round, const PrefixProbe& probe) const;
  std::int32_t NumGrainsToMatch(const Request& request) const;
  void PublishPending(Request& request, Holdings& holdings, StoreScope scope);
  void Publish(Request& request, Holdings& holdings, const RequestProgress& progress);
  void PublishSnapshot(Request& request, Holdings& holdings);
  void QueueSnapshot(const Request& request, const Holdings& holdings, StoreGuard guard);
  RequestProgress ProgressOf(Request& request, Holdings& holdings, StoreScope scope, bool publishes) const;
  // What the host copies as it is published: on the decode role, which has its prompts from a peer, nothing.
  StoreScope PrefillStoreScope() const;
  StoreScope DecodeStoreScope() const;
  // REQUIRED after each transaction that may have published blocks of the request.
  void DescribePublished(Request& request);
  bool Announces(const Request& request) const { return announces_extra_keys_ || !request.has_extra_keys; }

  void SetState(Request& request, RequestState state);
  RequestQueue& QueueOf(Phase phase);
  const RequestQueue& QueueOf(Phase phase) const;
  bool IsReadyUngranted(const Request& request) const;
  void CountState(const Request& request, std::int32_t change);
  void CountQuarantined(const RequestState& state, std::int32_t change);
  void DescribeRequest(const Request& request, std::string& out) const;

  const SchedulerConfig config_;
  CapacityModel capacity_model_;
  RowLayout row_layout_;
  ChunkRules chunk_rules_;
  CacheCoordinator coordinator_;                                        // outlives the requests' tables
  std::optional<PrefixEvents> prefix_events_;                           // hears what the requests' ends evict
  bool announces_extra_keys_ = true;                                    // prompts with extra keys as well
  std::optional<PrefixKeys> prefix_keys_;                               // likewise
  SlotPool slots_;                                                      // outlives the requests' leases
  std::unordered_map<std::string, std::unique_ptr<Request>> requests_;  // looked up, never walked
  std::array<RequestQueue, std::variant_size_v<RequestState>> queues_;  // by phase, older requests first
  std::uint64_t num_submitted_ = 0;
  std::uint64_t num_event_batches_ = 0;
  std::uint64_t num_plans_ = 0;
  std::int32_t num_ready_ungranted_ = 0;
  std::int32_t num_unsecured_ =
      0;  // requests that hold blocks and may need more than they were admitted with
  std::uint64_t num_retractions_ = 0;
  std::int64_t num_stalled_plans_ = 0;
  // By submission: the next to give way, which gets no rows until its results are in; and the prompt for
  // which others gave way in a round that it could not join.
  std::optional<std::uint64_t> yielding_;
  std::optional<std::uint64_t> first_in_line_;
  std::unordered_map<std::int32_t, std::int32_t>
      num_quarantined_children_;               // by parent that has any; looked up, never walked
  bool last_round_was_local_prefill_ = false;  // decode role
  bool holds_stores_back_ = false;             // somebody waits for room until no pinned store is under way

  // The newest plan's load, if it has one, and whose rows the plan has.
  struct LoadingPlan {
    std::uint64_t operation_id = 0;
    std::vector<std::pair<std::string, std::uint64_t>> requests;  // ids and submissions
  };
  LoadingPlan loading_plan_;
  // With prefix events: prefixes of which a part can be hit, and announced, when its load is done.
  struct Reading {
    std::vector<std::int32_t> tokens;
    std::vector<Digest> digests;
    bool is_announced;
  };
  std::vector<Reading> planned_readings_;                   // of the plan in the making
  std::map<std::uint64_t, std::vector<Reading>> readings_;  // by operation
};

}  // namespace pdmesh
