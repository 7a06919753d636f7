// Vector clocks. A granule keeps its last writer and the last read of every agent; an access that is not ordered after
// one that it conflicts with is noted, even if no harm came of it in the schedule of this run.
#include "races.h"

#include <algorithm>

#include "messages.h"

namespace emu {

namespace {

void note_race(Cta& cta, Warp& w, const Op& o, u32 granule, int agent, int other, const char* what) {
  cta.launch->note(format("RACE in shared memory: %s: %s by %s, not ordered after that of %s, offset %u", what,
                          where(cta, w, o).c_str(), agent_name(cta, agent).c_str(), agent_name(cta, other).c_str(),
                          granule * cta.races.granule));
}

template <class F>
void for_granules(const RaceState& races, u32 address, u32 size, F f) {
  u32 last = (address - SHARED_BASE + size - 1) / races.granule;
  for (u32 g = (address - SHARED_BASE) / races.granule; g <= last; g++) f(g);
}

}  // namespace

std::string agent_name(const Cta& cta, int agent) {
  int n = int(cta.warps.size());
  if (agent < n) return format("warp %d", agent);
  if (agent < 2 * n) return format("a bulk store of warp %d", agent - n);
  if (agent < 3 * n) return format("wgmma of warp %d", agent - 2 * n);
  if (agent < 4 * n) return format("cp.async of warp %d", agent - 3 * n);
  const int tensor = agent - tensor_mma_agent(cta);
  if (tensor < 0) return format("a TMA load on mbarrier %d", agent - 4 * n);
  if (tensor == 0) return "tcgen05.mma";
  return tensor <= n ? format("tcgen05.ld of warp %d", tensor - 1) : format("tcgen05.st of warp %d", tensor - 1 - n);
}

void start_races(Cta& cta) {
  RaceState& races = cta.races;
  const Launch& launch = *cta.launch;
  if (!launch.config.race_granule) return;
  const size_t warps = launch.warps;
  races.on = true;
  races.granule = u32(launch.config.race_granule);
  races.agents = int(4 * warps) + MAX_TRACKED_MBARRIERS;
  if (launch.program->uses_tensor_memory) races.agents += 1 + int(2 * warps);
  const size_t granules = launch.shared / races.granule + 2, agents = size_t(races.agents);
  races.known.assign(warps, std::vector<u32>(agents, 0));
  for (size_t k = 0; k < warps; k++) races.known[k][k] = 1;
  races.write_clock.assign(granules, 0);
  races.write_agent.assign(granules, NOBODY);
  races.write_atomic.assign(granules, 0);
  races.read_clock.assign(granules * agents, 0);
  cta.proxy.unfenced.assign(launch.shared / ProxyState::GRANULE + 2, {});
  for (Barrier& b : cta.barriers) b.clock.assign(agents, 0);
}

Agent warp_agent(const Cta& cta, const Warp& w) { return {w.id, cta.races.known[size_t(w.id)][size_t(w.id)]}; }
int bulk_agent(const Cta& cta, const Warp& w) { return int(cta.warps.size()) + w.id; }
int wgmma_agent(const Cta& cta, const Warp& w) { return 2 * int(cta.warps.size()) + w.id; }
int cp_async_agent(const Cta& cta, const Warp& w) { return 3 * int(cta.warps.size()) + w.id; }
int mbarrier_agent(const Cta& cta, int number) { return 4 * int(cta.warps.size()) + number; }
int tensor_mma_agent(const Cta& cta) { return 4 * int(cta.warps.size()) + MAX_TRACKED_MBARRIERS; }
int tensor_load_agent(const Cta& cta, const Warp& w) { return tensor_mma_agent(cta) + 1 + w.id; }
int tensor_store_agent(const Cta& cta, const Warp& w) { return tensor_load_agent(cta, w) + int(cta.warps.size()); }

void race_read(Cta& cta, Warp& w, const Op& o, u32 address, u32 size, Agent by) {
  RaceState& races = cta.races;
  if (!races.on) return;
  const auto& known = races.known[size_t(w.id)];
  for_granules(races, address, size, [&](u32 g) {
    u16 writer = races.write_agent[g];
    if (writer != NOBODY && races.write_clock[g] > known[writer])
      note_race(cta, w, o, g, by.id, writer, "read after write");
    u32& last = races.read_clock[size_t(g) * size_t(races.agents) + size_t(by.id)];
    last = std::max(last, by.clock);
  });
}

void race_write(Cta& cta, Warp& w, const Op& o, u32 address, u32 size, Agent by, WriteKind kind) {
  RaceState& races = cta.races;
  if (!races.on) return;
  const auto& known = races.known[size_t(w.id)];
  const bool same = kind == WriteKind::Same, atomic = kind == WriteKind::Atomic;
  for_granules(races, address, size, [&](u32 g) {
    u16 writer = races.write_agent[g];
    if (writer != NOBODY && races.write_clock[g] > known[writer] && !same && !(atomic && races.write_atomic[g]))
      note_race(cta, w, o, g, by.id, writer, "write after write");
    u32* reads = &races.read_clock[size_t(g) * size_t(races.agents)];
    for (int reader = 0; reader < races.agents; reader++) {
      const bool ordered = reads[reader] <= known[size_t(reader)];
      if (same && !ordered) continue;  // the next write must still be ordered after it
      if (!ordered) note_race(cta, w, o, g, by.id, reader, "write after read");
      reads[reader] = 0;
    }
    races.write_agent[g] = u16(by.id);
    races.write_atomic[g] = atomic;
    races.write_clock[g] = by.clock;
  });
}

void forget_writes(Cta& cta, int agent) {
  for (u16& writer : cta.races.write_agent)
    if (writer == agent) writer = NOBODY;
}

void shared_read(Cta& cta, Warp& w, const Op& o, u32 address, u32 size) {
  if (cta.races.on) race_read(cta, w, o, address, size, warp_agent(cta, w));
}

void shared_write(Cta& cta, Warp& w, const Op& o, u32 address, u32 size, WriteKind kind) {
  if (!cta.races.on) return;
  race_write(cta, w, o, address, size, warp_agent(cta, w), kind);
  generic_write(cta, address, size, warp_agent(cta, w));
}

void acquire(Cta& cta, Warp& w, const std::vector<u32>& clock) {
  if (!cta.races.on) return;
  auto& known = cta.races.known[size_t(w.id)];
  for (size_t i = 0; i < known.size(); i++) known[i] = std::max(known[i], clock[i]);
}

void acquire(Cta& cta, Warp& w, int agent, u32 clock) {
  if (!cta.races.on) return;
  u32& known = cta.races.known[size_t(w.id)][size_t(agent)];
  known = std::max(known, clock);
}

void release(Cta& cta, Warp& w, std::vector<u32>& clock) {
  if (!cta.races.on) return;
  auto& known = cta.races.known[size_t(w.id)];
  for (size_t i = 0; i < known.size(); i++) clock[i] = std::max(clock[i], known[i]);
  known[size_t(w.id)]++;
}

}  // namespace emu
