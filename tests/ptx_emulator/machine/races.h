// Races in shared memory, by vector clocks: every warp has, for each agent, the clock up to which it is ordered after
// it, and every granule has its last write and reads. Agents are warps and their operations in flight, so that one run
// covers all orders.
#pragma once
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;

constexpr int MAX_TRACKED_MBARRIERS = 64;
constexpr u16 NOBODY = 0xffff;  // no agent

// An agent that accesses memory, and the time of that by its own clock
struct Agent {
  int id;
  u32 clock;
};

struct RaceState {
  bool on = false;
  int agents = 0;
  u32 granule = 4;                      // bytes
  std::vector<std::vector<u32>> known;  // by warp: the clocks of all agents that it is ordered after
  std::vector<u32> write_clock, read_clock;
  std::vector<u16> write_agent;
  std::vector<u8> write_atomic;
};

// Writes of what is there already do not race; neither do atomics with each other.
enum class WriteKind { Plain, Same, Atomic };
enum class Access { Read, Write };

void start_races(Cta&);

Agent warp_agent(const Cta&, const Warp&);
int bulk_agent(const Cta&, const Warp&);      // its bulk stores: clocks are groups
int wgmma_agent(const Cta&, const Warp&);     // its wgmmas: clocks are groups
int cp_async_agent(const Cta&, const Warp&);  // its cp.asyncs: clocks are epochs
int mbarrier_agent(const Cta&, int number);   // TMA loads on an mbarrier: clocks are phases
// In kernels that use tensor memory; their clocks count them.
int tensor_mma_agent(const Cta&);  // all tcgen05.mma and cp of a CTA, which are done in order
int tensor_load_agent(const Cta&, const Warp&);
int tensor_store_agent(const Cta&, const Warp&);

std::string agent_name(const Cta&, int agent);

void race_read(Cta&, Warp&, const Op&, u32 address, u32 size, Agent by);
void race_write(Cta&, Warp&, const Op&, u32 address, u32 size, Agent by, WriteKind kind = WriteKind::Plain);
void forget_writes(Cta&, int agent);

// By this warp, through the generic proxy
void shared_read(Cta&, Warp&, const Op&, u32 address, u32 size);
void shared_write(Cta&, Warp&, const Op&, u32 address, u32 size, WriteKind kind = WriteKind::Plain);

// The warp is ordered after all that `clock` knows of, or after an agent's clock.
void acquire(Cta&, Warp&, const std::vector<u32>& clock);
void acquire(Cta&, Warp&, int agent, u32 clock);
// A warp that acquires `clock` is ordered after all that this warp has done so far, and not after what it does next.
void release(Cta&, Warp&, std::vector<u32>& clock);

}  // namespace emu
