// Barriers count threads, whole warps at a time. Registers that setmaxnreg.dec gives back go to a pool of the CTA, from
// which setmaxnreg.inc takes; that a warp group must meet between two of them is not checked.
#include "barriers.h"

#include <algorithm>

#include "decoder.h"
#include "lanes.h"
#include "messages.h"

namespace emu {

namespace {

struct BarrierOptions {
  bool waits;  // .sync, not .arrive
};
struct RegisterOptions {
  bool increase;
};

void try_release(Cta& cta, int id) {
  Barrier& b = cta.barriers[id];
  if (!b.arrived) return;
  u32 expected = b.expected;
  if (!expected)
    for (auto& w : cta.warps) expected += w->state == Warp::State::Done ? 0 : LANES;
  if (b.arrived < expected) return;
  if (b.arrived > expected)
    fail("%s: more threads at barrier %d than the %u that it is for", cta.program->name.c_str(), id, expected);
  b.arrived = 0;
  for (auto& w : cta.warps)
    if (w->state == Warp::State::AtBarrier && w->barrier == id) {
      w->state = Warp::State::Runs;
      acquire(cta, *w, b.clock);
    }
  std::fill(b.clock.begin(), b.clock.end(), 0);
}

}  // namespace

void decode_barrier(Decoder& d, Instruction& i) {
  size_t at = 1;
  if (i.word(at) == "cta") at++;
  if (i.word(at) == "cluster") d.bad("clusters are not implemented");
  if ((i.word(at) != "sync" && i.word(at) != "arrive") || i.operands.empty()) d.bad("barrier");
  i.op.kind = Kind::Barrier, i.op.together = Together::All;
  i.op.set<BarrierOptions>().waits = i.word(at) == "sync";
  i.op.s[0] = d.source(i.operands[0], 32);
  if (i.operands.size() > 1) i.op.s[1] = d.source(i.operands[1], 32);
}

void decode_setmaxnreg(Decoder& d, Instruction& i) {
  d.expect(i, 1);
  i.op.kind = Kind::SetRegisters, i.op.together = Together::All;
  i.op.set<RegisterOptions>().increase = i.word(1) == "inc";
  i.op.imm = i.operands[0].value;
  if (i.op.imm < 24 || i.op.imm > 256 || i.op.imm % 8) d.bad("setmaxnreg: count");
}

void arrive_at_barrier(Cta& cta, Warp& w, const Op& o) {
  const int id = int(reg<u32>(w, o.s[0])[0]);
  if (id < 0 || id >= BARRIERS) fail_at(cta, w, o, 0, "barrier number");
  Barrier& b = cta.barriers[id];
  const u32 expected = o.s[1] == NONE ? 0 : reg<u32>(w, o.s[1])[0];
  if (b.arrived && b.expected != expected) fail_at(cta, w, o, 0, "barrier: thread counts differ");
  b.expected = expected;
  b.arrived += LANES;
  cta.launch->counters[C_BAR_SYNC]++;
  release(cta, w, b.clock);
  fence_mbarrier_inits(cta, w);
  if (o.get<BarrierOptions>().waits) w.state = Warp::State::AtBarrier, w.barrier = id;
  try_release(cta, id);
}

void barriers_without_ended(Cta& cta) {
  for (int id = 0; id < BARRIERS; id++)
    if (!cta.barriers[id].expected) try_release(cta, id);
}

bool registers_ready(const Cta& cta, const Warp& w) {
  return LANES * (w.wanted_registers - w.register_count) <= cta.free_registers;
}

bool set_registers(Cta& cta, Warp& w, const Op& o) {
  if (!w.register_count) fail_at(cta, w, o, 0, "setmaxnreg in a kernel without .maxnreg");
  const int more = int(o.imm) - w.register_count;
  if (o.get<RegisterOptions>().increase ? more < 0 : more > 0)
    fail_at(cta, w, o, 0, format("setmaxnreg from %d registers", w.register_count));
  w.wanted_registers = int(o.imm);
  if (!registers_ready(cta, w)) return false;
  cta.free_registers -= LANES * more, w.register_count += more;
  return true;
}

}  // namespace emu
