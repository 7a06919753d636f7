// The state of a launch: CTAs of warps, operations in flight, counters and notes. One CTA is a cluster.
// Everything asynchronous may complete when issued, at the latest moment that the program's waits allow, or at random.
#pragma once
#include <memory>
#include <random>
#include <typeindex>
#include <unordered_map>

#include "barriers.h"
#include "bulk_stores.h"
#include "counters.h"
#include "cp_async.h"
#include "fences.h"
#include "in_flight.h"
#include "journal.h"
#include "mbarriers.h"
#include "program.h"
#include "races.h"
#include "wgmma.h"

namespace emu {

constexpr u32 SHARED_BASE = 1024;  // where dynamic shared memory starts in the shared window, as on Hopper
constexpr int MAX_WARPS = 32;

enum class Mode { Early, Late, Random };

// Bits of fractions that tensor cores keep: of terms aligned to the largest exponent among them, and of their sum
struct SumBits {
  int terms = 0;  // none: the products are exact and added one by one, each sum rounded to fp32
  int sums = 0;
};

struct Config {
  Mode mode = Mode::Early;
  int seed = 0;
  int resident = 1;    // CTAs at the same time
  int quantum = 4096;  // instructions of a warp at a time (at most, if random)
  bool random_schedule = false;
  int race_granule = 0;  // look for races in shared memory, at so many bytes; 0: do not
  bool global_races = false;
  bool trace = false;
  u64 step_budget = 4'000'000'000;
  SumBits wide_sums, narrow_sums;  // of MMAs whose operands have 16 bits or more, and 8 bits

  std::string name() const;
};

// Lanes of a warp that are at the same instruction
struct Fragment {
  s32 pc;
  u32 mask;
  bool waits;  // for the other lanes
};

struct Warp {
  enum class State { Runs, AtBarrier, AtMbarrier, AtRegisters, Done };

  int id;
  u8* registers;
  std::vector<u8> storage;
  u32 alive;
  std::vector<Fragment> fragments;
  State state = State::Runs;
  int barrier = 0;  // at which it waits
  u32 mbarrier_address = 0, mbarrier_parity = 0;
  int register_count = 0, wanted_registers = 0;  // of a thread, by setmaxnreg
  std::vector<u8> in_flight;                     // by register offset / 64: how many asynchronous instructions use it
  int flying = 0;                                // how many such instructions there are
  CpAsyncState cp_async;
  WgmmaState wgmma;
  BulkStoreState bulk;
};

// State that a family of instructions keeps for a CTA, if it needs any; made at its first use (Cta::state).
struct FamilyState {
  virtual ~FamilyState() = default;
  virtual void end(Cta& cta) = 0;  // when all warps have ended: checks that nothing is left
};

struct Launch;

struct Cta {
  Launch* launch;
  const Program* program;
  u32 index[3];
  u64 linear;
  std::vector<u8> shared_storage;
  u8* shared;
  u32 shared_bytes;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[BARRIERS];
  Mbarriers mbarriers;
  InFlight in_flight;
  size_t next_warp = 0;
  int free_registers = 0;  // that warps have given back by setmaxnreg
  RaceState races;
  ProxyState proxy;
  std::unordered_map<std::type_index, std::unique_ptr<FamilyState>> family_states;

  template <class State>
  State& state() {
    std::unique_ptr<FamilyState>& slot = family_states[typeid(State)];
    if (!slot) slot = std::make_unique<State>();
    return static_cast<State&>(*slot);
  }
  u8* shared_at(u32 address) { return shared + (address - SHARED_BASE); }
};

struct Allocation {
  u64 start, end;
};

struct Launch {
  const Program* program;
  Config config;
  u32 grid[3];
  u32 threads, warps;
  u32 shared;
  std::vector<u8> params_storage;
  u8* params;
  std::vector<Allocation> allocations;  // of global memory, sorted
  size_t last_allocation = 0;
  Journal* journal = nullptr;
  u64 counters[C_COUNT] = {};
  std::vector<u64> op_count, op_conflicts;  // by operation
  u64 steps = 0;
  std::mt19937 random;
  std::vector<std::string> notes;
  std::unordered_map<std::string, int> note_counts;
  std::vector<BulkStore> late_writes;  // stores that have read shared memory, and that nothing has waited for
  std::unordered_map<u64, u64> global_writers, global_readers;  // by word of 4 bytes: 1 + CTA

  // Notes of the same instruction (up to the first `[`) are kept once, and counted.
  void note(const std::string& text);
  int count_of(const std::string& note) const;
  void before_write(u64 address, u64 size) {
    if (journal) journal->before_write(address, size);
  }
};

}  // namespace emu
