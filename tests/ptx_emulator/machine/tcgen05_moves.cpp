// tcgen05.ld, st and their waits: between tensor memory and the registers of a warp, which reaches 32 lanes only. They
// are done when issued, or when waited for.
#include <algorithm>
#include <cstdlib>

#include "messages.h"
#include "tcgen05.h"

namespace emu {

namespace {

// PTX ISA, tcgen05: Data Movement Shape; the names say lanes, bits, and that there are two of them
enum class Shape : u8 { L32B32, L16B64, L16B128, L16B256, L16B32x2 };
const std::map<std::string, Shape> shapes = {{"32x32b", Shape::L32B32},
                                             {"16x64b", Shape::L16B64},
                                             {"16x128b", Shape::L16B128},
                                             {"16x256b", Shape::L16B256},
                                             {"16x32bx2", Shape::L16B32x2}};
struct MoveOptions {
  Shape shape;
  bool halves;  // .pack::16b, .unpack::16b: a register is two columns of 16 bits
  s32 split;    // of .16x32bx2: columns from the first half to the second
  u32 lanes() const { return shape == Shape::L32B32 ? 32 : 16; }
  u32 columns(size_t registers) const {
    const bool wide = shape == Shape::L16B64 || shape == Shape::L16B128 || shape == Shape::L16B256;
    return u32(registers) * (wide ? 2 : 1) * (halves ? 2 : 1);
  }
};
u32 registers_of(Shape shape) { return shape == Shape::L16B256 ? 4 : shape == Shape::L16B128 ? 2 : 1; }

// Where register k of a thread lies, from the instruction's address on
TensorAddress place(Shape shape, u32 k, u32 thread) {
  TensorAddress at(0);
  const u32 row = thread / 4;
  switch (shape) {
    case Shape::L32B32: at.lane = thread, at.column = k; break;
    case Shape::L16B64: at.lane = row + thread % 2 * 8, at.column = thread / 2 % 2 + k * 2; break;
    case Shape::L16B128: at.lane = row + k % 2 * 8, at.column = thread % 4 + k / 2 * 4; break;
    case Shape::L16B256: at.lane = row + k / 2 % 2 * 8, at.column = k % 2 + thread % 4 * 2 + k / 4 * 8; break;
    case Shape::L16B32x2: at.lane = thread % 16, at.column = k; break;
  }
  return at;
}

// Where the halves of a move start: there are two of .16x32bx2.
std::vector<TensorAddress> starts(const MoveOptions& options, u32 address) {
  if (options.shape != Shape::L16B32x2) return {TensorAddress(address)};
  return {TensorAddress(address), TensorAddress(address + u32(options.split))};
}

// Calls f(register, thread, lane, column).
template <class F>
void for_elements(const Op& o, u32 address, F f) {
  const auto& options = o.get<MoveOptions>();
  const auto from = starts(options, address);
  for (u32 k = 0; k < o.list.size(); k++)
    for (u32 i = 0; i < u32(LANES); i++) {
      const TensorAddress at = place(options.shape, k, i), start = from[from.size() == 2 && i >= 16 ? 1 : 0];
      f(k, i, start.lane + at.lane, start.column + at.column * (options.halves ? 2 : 1));
    }
}

template <class F>
void for_cells(const Op& o, u32 address, F f) {
  const auto& options = o.get<MoveOptions>();
  for (const TensorAddress& start : starts(options, address))
    for (u32 lane = 0; lane < options.lanes(); lane += TENSOR_CELL_LANES)
      for (u32 column = 0; column < options.columns(o.list.size()); column++)
        f(tensor_cell(start.lane + lane, start.column + column));
}

// PTX ISA, tcgen05: Access restrictions: warp k of a warp group reaches the lanes from 32k on.
void check(Cta& cta, Warp& w, const Op& o, u32 address) {
  const auto& options = o.get<MoveOptions>();
  const u32 own = u32(w.id % 4) * 32;
  for (const TensorAddress& start : starts(options, address)) {
    if (start.lane % options.lanes())
      fail_at(cta, w, o, 0, format("tensor memory: lane %u with a shape of %u lanes", start.lane, options.lanes()));
    if (start.lane < own || start.lane + options.lanes() > own + 32)
      fail_at(
          cta, w, o, 0,
          format("tensor memory: lanes from %u on, but warp %d reaches %u...%u only", start.lane, w.id, own, own + 31));
    tensor_memory(cta).check_columns(cta, w, o, start.column, options.columns(o.list.size()));
  }
}

void load(Cta& cta, Warp& w, const TensorMove& move) {
  const Op& o = cta.program->ops[size_t(move.op)];
  TensorMemory& t = tensor_memory(cta);
  const bool halves = o.get<MoveOptions>().halves;
  auto word = [&](u32 lane, u32 column) {
    const u32 cell = tensor_cell(lane, column);
    return t.unfinished[cell] || (!move.lost.empty() && move.lost[cell]) ? TENSOR_NAN : t.word(lane, column);
  };
  for_elements(o, move.address, [&](u32 k, u32 i, u32 lane, u32 column) {
    u32& v = reg<u32>(w, o.list[k].offset)[i];
    v = word(lane, column);
    if (halves) v = (v & 0xffff) | word(lane, column + 1) << 16;
  });
}

void store(Cta& cta, const TensorMove& move) {
  const Op& o = cta.program->ops[size_t(move.op)];
  TensorMemory& t = tensor_memory(cta);
  const bool halves = o.get<MoveOptions>().halves;
  for_elements(o, move.address, [&](u32 k, u32 i, u32 lane, u32 column) {
    const u32 v = move.values[k * u32(LANES) + i];
    t.word(lane, column) = halves ? v & 0xffff : v;
    if (halves) t.word(lane, column + 1) = v >> 16;
  });
}

bool at_once(Launch& launch) {
  const Mode mode = launch.config.mode;
  return mode == Mode::Early || (mode == Mode::Random && (launch.random() & 1));
}

TensorMove move_of(Cta& cta, Warp& w, const Op& o, u32 mask) {
  TensorMove move{o.number, uniform(cta, w, o, mask, addresses(w, o.address[0]).at, "the address"), {}, {}};
  check(cta, w, o, move.address);
  return move;
}

void issue_load(Cta& cta, Warp& w, const Op& o, u32 mask) {
  TensorMove move = move_of(cta, w, o, mask);
  TensorMemory& t = tensor_memory(cta);
  const u32 clock = ++t.loaded[size_t(w.id)];
  for_cells(o, move.address, [&](u32 cell) { t.read(cta, w, o, cell, {tensor_load_agent(cta, w), clock}); });
  cta.launch->counters[C_TENSOR_LOADS]++;
  if (at_once(*cta.launch)) return load(cta, w, move);
  for_cells(o, move.address, [&](u32 cell) {
    if (!t.unfinished[cell]) return;
    move.lost.resize(TENSOR_CELLS);
    move.lost[cell] = true;
  });
  for (const Slot& r : o.list) {
    w.in_flight[r.offset / 64]++;
    memset(reg<u32>(w, r.offset), 0xff, LANES * sizeof(u32));
  }
  w.flying++;
  t.loads[size_t(w.id)].push_back(std::move(move));
}

void issue_store(Cta& cta, Warp& w, const Op& o, u32 mask) {
  TensorMove move = move_of(cta, w, o, mask);
  TensorMemory& t = tensor_memory(cta);
  const u32 clock = ++t.stored[size_t(w.id)];
  for_cells(o, move.address, [&](u32 cell) { t.write(cta, w, o, cell, {tensor_store_agent(cta, w), clock}); });
  cta.launch->counters[C_TENSOR_STORES]++;
  move.values.resize(o.list.size() * LANES);
  for (size_t k = 0; k < o.list.size(); k++)
    memcpy(&move.values[k * LANES], reg<u32>(w, o.list[k].offset), LANES * sizeof(u32));
  if (at_once(*cta.launch)) return store(cta, move);
  for_cells(o, move.address, [&](u32 cell) { t.unfinished[cell]++; });
  t.stores[size_t(w.id)].push_back(std::move(move));
}

void settle(Cta& cta, Warp& w, const TensorMove& move) {
  load(cta, w, move);
  for (const Slot& r : cta.program->ops[size_t(move.op)].list) w.in_flight[r.offset / 64]--;
  w.flying--;
}

void wait_loads(Cta& cta, Warp& w, const Op&, u32) {
  TensorMemory& t = tensor_memory(cta);
  auto& loads = t.loads[size_t(w.id)];
  for (auto& move : loads) settle(cta, w, move);
  loads.clear();
  if (cta.races.on) acquire(cta, w, tensor_load_agent(cta, w), t.loaded[size_t(w.id)]);
}

void wait_stores(Cta& cta, Warp& w, const Op&, u32) {
  TensorMemory& t = tensor_memory(cta);
  auto& stores = t.stores[size_t(w.id)];
  for (auto& move : stores) {
    store(cta, move);
    for_cells(cta.program->ops[size_t(move.op)], move.address, [&](u32 cell) { t.unfinished[cell]--; });
  }
  stores.clear();
  if (cta.races.on) acquire(cta, w, tensor_store_agent(cta, w), t.stored[size_t(w.id)]);
}

}  // namespace

// PTX ISA, tcgen05 Memory Consistency Model: an instruction that depends on a register of a tcgen05.ld comes after it
// without a wait; the ld's read of tensor memory stays unordered until the wait.
bool settle_tensor_loads(Cta& cta, Warp& w, u32 offset) {
  if (!cta.program->uses_tensor_memory) return false;
  auto& loads = tensor_memory(cta).loads[size_t(w.id)];
  bool found = false;
  while (!loads.empty() && w.in_flight[offset / 64]) {
    settle(cta, w, loads.front());
    loads.erase(loads.begin());
    found = true;
  }
  return found;
}

void decode_tensor_move(Decoder& d, Instruction& i) {
  const bool is_load = i.word(1) == "ld";
  auto& options = i.op.set<MoveOptions>();
  bool has_shape = false;
  u32 repeat = 0;
  for (size_t k = 2; k < i.words.size(); k++) {
    const std::string& word = i.words[k];
    if (auto found = shapes.find(word); found != shapes.end()) options.shape = found->second, has_shape = true;
    else if (word[0] == 'x') repeat = u32(atoi(word.c_str() + 1));
    else if (word == (is_load ? "pack::16b" : "unpack::16b")) options.halves = true;
    else if (word != "sync" && word != "aligned" && word != "b32") d.bad("not implemented: " + word);
  }
  const bool split = options.shape == Shape::L16B32x2;
  const u32 registers = repeat * registers_of(options.shape);
  if (!has_shape || !registers || registers > 128) d.bad("shape");
  d.expect(i, split ? 3 : 2);
  const Operand &address = i.operands[is_load ? 1 : 0], &values = i.operands[is_load ? 0 : i.operands.size() - 1];
  if (split) options.split = s32(i.operands[is_load ? 2 : 1].value);
  const auto elements = values.elements();
  if (elements.size() != registers) d.bad("registers");
  for (auto& e : elements) i.op.list.push_back(is_load ? d.destination_slot(e, 32) : d.source_slot(e, 32));
  i.op.address[0] = d.address(address);
  i.op.together = Together::All;
  i.op.fn = is_load ? issue_load : issue_store;
}

void decode_tensor_wait(Decoder& d, Instruction& i) {
  d.expect(i, 0);
  if (!i.has("sync") || !i.has("aligned")) d.bad("wait");
  i.op.together = Together::All;
  i.op.fn = i.word(1) == "wait::ld" ? wait_loads : wait_stores;
}

}  // namespace emu
