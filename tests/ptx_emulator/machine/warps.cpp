// The loop over the instructions of a warp, and the operations that change where its lanes are.
#include "warps.h"

#include <cstdio>

#include "lanes.h"
#include "messages.h"
#include "special_registers.h"
#include "tensor_memory.h"

namespace emu {

namespace {

// Merges fragments that are at the same instruction; returns the one to run, with the smallest pc.
size_t reconverge(const Cta& cta, Warp& w) {
  auto& fragments = w.fragments;
  for (size_t i = 0; i < fragments.size(); i++)
    for (size_t j = fragments.size(); j-- > i + 1;)
      if (fragments[i].pc == fragments[j].pc) {
        fragments[i].mask |= fragments[j].mask, fragments[i].waits = false;
        fragments.erase(fragments.begin() + long(j));
      }
  size_t best = fragments.size();
  for (size_t i = 0; i < fragments.size(); i++)
    if (!fragments[i].waits && (best == fragments.size() || fragments[i].pc < fragments[best].pc)) best = i;
  if (best == fragments.size()) fail_deadlock(cta, "Lanes of one warp wait for each other at different places");
  return best;
}

// False if the fragment has to wait for other lanes that the operation names.
bool all_are_here(Cta& cta, Warp& w, const Op& o, Fragment& f, u32 mask) {
  u32 members = w.alive;
  if (o.together == Together::Members) members &= reg<u32>(w, o.members)[__builtin_ctz(f.mask)];
  if ((f.mask & members) != members && mask) {
    if (w.fragments.size() == 1) fail_at(cta, w, o, 0, "not all lanes that it names take part");
    f.waits = true;
    return false;
  }
  if (o.together == Together::All && mask && mask != members)
    fail_at(cta, w, o, 0, format("lanes %08x only of %08x", mask, members));
  return true;
}

void check_in_flight(Cta& cta, Warp& w, const Op& o) {
  for (u32 r : o.touched)
    if (w.in_flight[r / 64] && !settle_tensor_loads(cta, w, r))
      fail_at(cta, w, o, 0, format("touches %s, which a wgmma in flight uses", cta.program->register_name(r).c_str()));
}

void branch(Warp& w, const Op& o, Fragment& f, u32 mask) {
  if (mask == f.mask) {
    f.pc = o.target;
    return;
  }
  f.pc++;
  if (!mask) return;
  f.mask &= ~mask;
  w.fragments.push_back({o.target, mask, false});
}

void branch_indexed(Cta& cta, Warp& w, const Op& o, size_t which, u32 mask) {
  const auto& targets = cta.program->branch_tables[size_t(o.target)];
  const Fragment before = w.fragments[which];
  w.fragments.erase(w.fragments.begin() + long(which));
  if (before.mask & ~mask) w.fragments.push_back({before.pc + 1, before.mask & ~mask, false});
  for_lanes(mask, [&](int i) {
    u32 index = reg<u32>(w, o.s[0])[i];
    if (index >= targets.size()) fail_at(cta, w, o, i, format("index %u of %zu targets", index, targets.size()));
    for (Fragment& f : w.fragments)
      if (!f.waits && f.pc == targets[index]) {
        f.mask |= 1u << i;
        return;
      }
    w.fragments.push_back({targets[index], 1u << i, false});
  });
}

void exit_lanes(Warp& w, size_t which, u32 mask) {
  Fragment& f = w.fragments[which];
  w.alive &= ~mask, f.mask &= ~mask, f.pc++;
  if (mask)
    for (Fragment& g : w.fragments) g.waits = false;
  if (!f.mask) w.fragments.erase(w.fragments.begin() + long(which));
}

// True if the warp has to wait: no lane passes, and no other lane can go on.
bool wait_at_mbarrier(Cta& cta, Warp& w, const Op& o, u32 mask) {
  o.fn(cta, w, o, mask);
  u64* c = cta.launch->counters;
  c[C_MBAR_WAITS]++;
  const u32 ready = predicate(w, o.d[0]) & mask;
  if (ready == mask) return false;
  c[C_MBAR_BLOCKED]++;
  if (w.fragments.size() > 1 || ready) return false;
  w.state = Warp::State::AtMbarrier;
  return true;
}

void end_warp(Cta& cta, Warp& w) {
  w.state = Warp::State::Done;
  end_cp_async(cta, w);
  end_bulk_stores(cta, w);
  end_wgmma(cta, w);
  barriers_without_ended(cta);
}

// Executes an operation for a fragment; false when the warp has to wait.
bool execute(Cta& cta, Warp& w, const Op& o, size_t which, u32 mask) {
  Fragment& f = w.fragments[which];
  switch (o.kind) {
    case Kind::Compute:
      if (mask) {
        o.fn(cta, w, o, mask);
        for (u32 r : o.writes) w.wgmma.written[r / 64] = 1;
      }
      f.pc++;
      return true;
    case Kind::Branch: branch(w, o, f, mask); return true;
    case Kind::BranchIndexed: branch_indexed(cta, w, o, which, mask); return true;
    case Kind::Exit: exit_lanes(w, which, mask); return true;
    case Kind::Trap:
      if (mask) fail_at(cta, w, o, __builtin_ctz(mask), "trap");
      f.pc++;
      return true;
    case Kind::Barrier:
      f.pc++;
      if (mask) arrive_at_barrier(cta, w, o);
      return w.state == Warp::State::Runs;
    case Kind::MbarrierWait: f.pc++; return !mask || !wait_at_mbarrier(cta, w, o, mask);
    case Kind::SetRegisters:
      if (mask && !set_registers(cta, w, o)) {
        w.state = Warp::State::AtRegisters;
        return false;
      }
      f.pc++;
      return true;
  }
  return true;
}

}  // namespace

std::unique_ptr<Warp> new_warp(const Launch& launch, Cta& cta, int id) {
  const Program& p = *launch.program;
  auto w = std::make_unique<Warp>();
  w->id = id, w->alive = ALL_LANES;
  w->register_count = p.maxnreg;
  w->storage.resize(p.register_bytes + 64);
  w->registers = w->storage.data() + (64 - u64(w->storage.data()) % 64) % 64;
  memcpy(w->registers, p.initial.data(), p.register_bytes);
  w->in_flight.assign(p.register_bytes / 64 + 1, 0);
  w->wgmma.written.assign(p.register_bytes / 64 + 1, 0);
  w->fragments.push_back({0, ALL_LANES, false});
  set_special_registers(launch, cta, *w);
  return w;
}

bool can_run(const Cta& cta, const Warp& w) {
  switch (w.state) {
    case Warp::State::Runs: return true;
    case Warp::State::AtMbarrier: return wait_is_over(cta, w.mbarrier_address, w.mbarrier_parity);
    case Warp::State::AtRegisters: return registers_ready(cta, w);
    default: return false;
  }
}

void run_warp(Cta& cta, Warp& w, int quantum) {
  Launch& launch = *cta.launch;
  const auto& ops = cta.program->ops;
  u64 executed = 0;
  w.state = Warp::State::Runs;
  for (bool runs = true; runs;) {
    if (w.fragments.empty()) {
      end_warp(cta, w);
      break;
    }
    size_t which = 0;
    if (w.fragments.size() > 1) {
      which = reconverge(cta, w);
      launch.counters[C_DIVERGENT]++;
    }
    if (quantum-- <= 0) break;
    Fragment& f = w.fragments[which];
    if (size_t(f.pc) >= ops.size()) fail("%s: ran past the end", cta.program->name.c_str());
    const Op& o = ops[size_t(f.pc)];
    u32 mask = f.mask;
    if (o.guard != NONE) mask &= predicate(w, o.guard, o.guard_negated);
    if (o.together != Together::Any && !all_are_here(cta, w, o, f, mask)) continue;
    if (launch.config.trace && w.id == 0)
      fprintf(stderr, "%u.%d %d: %s [%08x]\n", cta.index[0], w.id, o.line, cta.program->text[size_t(f.pc)].c_str(),
              mask);
    if (w.flying && mask && !o.meets_in_flight) check_in_flight(cta, w, o);
    launch.op_count[size_t(f.pc)]++;
    executed++;
    runs = execute(cta, w, o, which, mask);
    if (w.state == Warp::State::AtRegisters) executed--;  // it will be executed again
  }
  launch.counters[C_INSTRUCTIONS] += executed;
  launch.steps += executed;
  if (launch.steps > launch.config.step_budget) fail_deadlock(cta, "The step budget is spent");
}

}  // namespace emu
