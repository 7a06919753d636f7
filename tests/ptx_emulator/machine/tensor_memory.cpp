// Bounds and races of tensor memory, by the same vector clocks as those of shared memory.
#include "tensor_memory.h"

#include <algorithm>

#include "messages.h"

namespace emu {

namespace {

constexpr int NO_WRITER = -1;

std::string place_of(u32 cell) {
  const u32 groups = TENSOR_LANES / TENSOR_CELL_LANES;
  return format("lanes from %u on, column %u", cell % groups * TENSOR_CELL_LANES, cell / groups);
}

void note_race(Cta& cta, Warp& w, const Op& o, u32 cell, int agent, int other, const char* what) {
  cta.launch->note(format("RACE in tensor memory: %s: %s by %s, not ordered after that of %s, %s", what,
                          where(cta, w, o).c_str(), agent_name(cta, agent).c_str(), agent_name(cta, other).c_str(),
                          place_of(cell).c_str()));
}

// PTX ISA, tcgen05 Memory Consistency Model: MMAs and copies of one CTA are done in the order in which they were
// issued.
bool in_order(const Cta& cta, int agent, int other) { return agent == other && agent == tensor_mma_agent(cta); }

}  // namespace

TensorMemory& tensor_memory(Cta& cta) {
  TensorMemory& t = cta.state<TensorMemory>();
  if (!t.words.empty()) return t;
  const size_t warps = cta.warps.size();
  t.words.assign(TENSOR_LANES * TENSOR_COLUMNS, TENSOR_NAN);
  t.unfinished.assign(TENSOR_CELLS, 0);
  t.loads.resize(warps), t.stores.resize(warps);
  t.issued.assign(warps, 0), t.loaded.assign(warps, 0), t.stored.assign(warps, 0);
  if (!cta.races.on) return t;
  t.write_clock.assign(TENSOR_CELLS, 0), t.write_agent.assign(TENSOR_CELLS, NO_WRITER);
  t.read_clock.assign(TENSOR_CELLS * (1 + 2 * warps), 0);
  return t;
}

void TensorMemory::check_columns(Cta& cta, Warp& w, const Op& o, u32 first, u32 count) const {
  const u32 last = first + count - 1;
  if (last >= TENSOR_COLUMNS)
    fail_at(cta, w, o, 0, format("tensor memory: columns %u...%u are out of bounds", first, last));
  for (u32 unit = first / TENSOR_UNIT; unit <= last / TENSOR_UNIT; unit++) {
    if (!owner[unit])
      fail_at(cta, w, o, 0, format("tensor memory: column %u is not allocated", std::max(first, unit * TENSOR_UNIT)));
    if (owner[unit] != owner[first / TENSOR_UNIT])
      fail_at(cta, w, o, 0, format("tensor memory: columns %u...%u are of two allocations", first, last));
  }
}

// Agents of tensor memory count from the first of them.
size_t TensorMemory::reader_slot(const Cta& cta, u32 cell, int agent) const {
  return cell * (1 + 2 * cta.warps.size()) + size_t(agent - tensor_mma_agent(cta));
}

void TensorMemory::check_writer(Cta& cta, Warp& w, const Op& o, u32 cell, int agent, const char* what) const {
  const int writer = write_agent[cell];
  if (writer == NO_WRITER || in_order(cta, agent, writer)) return;
  if (write_clock[cell] > cta.races.known[size_t(w.id)][size_t(writer)])
    note_race(cta, w, o, cell, agent, writer, what);
}

void TensorMemory::read(Cta& cta, Warp& w, const Op& o, u32 cell, Agent by) {
  if (!cta.races.on) return;
  check_writer(cta, w, o, cell, by.id, "read after write");
  read_clock[reader_slot(cta, cell, by.id)] = by.clock;
}

void TensorMemory::read_operand(Cta& cta, Warp& w, const Op& o, u32 cell, Agent by) {
  if (!cta.races.on) return;
  if (write_agent[cell] == NO_WRITER)
    cta.launch->note(format("UNWRITTEN: an operand in tensor memory that nothing has written: %s, %s",
                            where(cta, w, o).c_str(), place_of(cell).c_str()));
  read(cta, w, o, cell, by);
}

void TensorMemory::write(Cta& cta, Warp& w, const Op& o, u32 cell, Agent by) {
  if (!cta.races.on) return;
  check_writer(cta, w, o, cell, by.id, "write after write");
  const auto& known = cta.races.known[size_t(w.id)];
  for (int reader = tensor_mma_agent(cta); reader < cta.races.agents; reader++) {
    u32& last = read_clock[reader_slot(cta, cell, reader)];
    if (last > known[size_t(reader)] && !in_order(cta, by.id, reader))
      note_race(cta, w, o, cell, by.id, reader, "write after read");
    last = 0;
  }
  write_agent[cell] = by.id, write_clock[cell] = by.clock;
}

void TensorMemory::forget(const Cta& cta, u32 first, u32 count) {
  if (!cta.races.on) return;
  const u32 from = tensor_cell(0, first), to = tensor_cell(0, first + count);
  const size_t agents = 1 + 2 * cta.warps.size();
  std::fill(write_agent.begin() + from, write_agent.begin() + to, NO_WRITER);
  std::fill(read_clock.begin() + long(from * agents), read_clock.begin() + long(to * agents), 0);
}

void TensorMemory::end(Cta& cta) {
  for (u32 unit = 0; unit < TENSOR_COLUMNS / TENSOR_UNIT; unit++)
    if (owner[unit])
      fail("%s: CTA (%u, %u, %u) ends with %u columns of tensor memory allocated", cta.program->name.c_str(),
           cta.index[0], cta.index[1], cta.index[2], size[(owner[unit] - 1) / TENSOR_UNIT]);
  auto note = [&](const std::vector<std::vector<TensorMove>>& moves, const char* what) {
    for (auto& of_warp : moves)
      if (!of_warp.empty()) cta.launch->note(format("a CTA ends with %s that nothing waited for", what));
  };
  note(loads, "tcgen05.ld"), note(stores, "tcgen05.st");
}

}  // namespace emu
