// cp.async and its groups. A copy is done when issued or when something waits for it; its destination holds NaNs until
// then. Copies are writes of the generic proxy, ordered by wait_group or by the mbarrier that tracks them.
#include "cp_async.h"

#include <algorithm>

#include "banks.h"
#include "decoder.h"
#include "messages.h"

namespace emu {

namespace {

struct CopyOptions {
  u8 bytes;
};
struct WaitOptions {
  bool all;  // .wait_all: copies that are not committed as well
};
struct TrackOptions {
  bool noinc;
};

void perform(Cta& cta, Warp& w, CpAsyncCopy& copy, u32 lanes) {
  const Op& o = cta.program->ops[size_t(copy.op)];
  for_lanes(copy.mask & lanes, [&](int i) {
    u8* d = cta.shared_at(copy.destination[i]);
    if (copy.source_size[i]) {
      check_global(cta, w, o, i, copy.source[i], copy.source_size[i], Access::Read);
      memcpy(d, reinterpret_cast<const u8*>(copy.source[i]), copy.source_size[i]);
    }
    memset(d + copy.source_size[i], 0, copy.size - copy.source_size[i]);
    generic_write(cta, copy.destination[i], copy.size, {cp_async_agent(cta, w), copy.epoch});
  });
  copy.mask &= ~lanes;
}

template <class F>
void for_copies(CpAsyncState& state, F f) {
  for (auto& group : state.groups)
    for (auto& copy : group.copies) f(copy);
  for (auto& copy : state.open) f(copy);
}

void copy_async(Cta& cta, Warp& w, const Op& o, u32 mask) {
  CpAsyncCopy copy;
  copy.mask = mask, copy.size = o.get<CopyOptions>().bytes, copy.op = o.number, copy.epoch = w.cp_async.epoch;
  const Addresses to = addresses(w, o.address[0]), from = addresses(w, o.address[1]);
  Launch& launch = *cta.launch;
  u32 reading = 0;
  for_lanes(mask, [&](int i) {
    copy.destination[i] = u32(to[i]), copy.source[i] = from[i];
    const u32 n = copy.source_size[i] = o.s[0] == NONE ? copy.size : reg<u32>(w, o.s[0])[i];
    if (n > copy.size) fail_at(cta, w, o, i, "cp.async: more source than destination");
    check_shared(cta, w, o, i, copy.destination[i], copy.size);
    if (copy.destination[i] % copy.size) fail_at(cta, w, o, i, "cp.async: misaligned destination");
    if (n) {
      if (from[i] % copy.size)
        fail_at(cta, w, o, i, format("cp.async: misaligned source 0x%llx", (unsigned long long)from[i]));
      check_global(cta, w, o, i, from[i], n, Access::Read);
      reading |= 1u << i;
    }
    race_write(cta, w, o, copy.destination[i], copy.size, {cp_async_agent(cta, w), copy.epoch});
    launch.counters[C_CP_ASYNC_BYTES] += n;
  });
  launch.counters[C_CP_ASYNC]++;
  launch.counters[C_GLOBAL_LOAD_SECTORS] += u64(count_sectors(from, reading, copy.size));
  count_wavefronts(cta, o, to, mask, copy.size, C_SHARED_STORE_CONFLICTS);
  const Mode mode = launch.config.mode;
  if (mode == Mode::Early || (mode == Mode::Random && (launch.random() & 1))) return perform(cta, w, copy, mask);
  for_lanes(mask, [&](int i) { memset(cta.shared_at(copy.destination[i]), 0xff, copy.size); });
  w.cp_async.open.push_back(copy);
}

void commit_group(Cta&, Warp& w, const Op&, u32) {
  CpAsyncState& state = w.cp_async;
  state.groups.push_back({std::move(state.open), state.epoch++});
  state.open.clear();
}

void wait_group(Cta& cta, Warp& w, const Op& o, u32) {
  CpAsyncState& state = w.cp_async;
  while (state.groups.size() > size_t(o.imm)) {
    CpAsyncGroup& oldest = state.groups.front();
    for (auto& copy : oldest.copies) perform(cta, w, copy, ALL_LANES);
    acquire(cta, w, cp_async_agent(cta, w), oldest.epoch);
    state.groups.pop_front();
  }
  if (!o.get<WaitOptions>().all) return;
  for (auto& copy : state.open) perform(cta, w, copy, ALL_LANES);
  state.open.clear();
  acquire(cta, w, cp_async_agent(cta, w), state.epoch++);
}

// PTX ISA, cp.async.mbarrier.arrive: an arrival of each thread once all that it has copied so far is there.
struct CpAsyncArrival : AsyncOperation {
  int warp, op;
  u32 mask, epoch;  // lanes, and the last epoch of their copies
  u32 address[LANES];

  void complete(Cta& cta) override {
    Warp& w = *cta.warps[size_t(warp)];
    const Op& o = cta.program->ops[size_t(op)];
    for_copies(w.cp_async, [&](CpAsyncCopy& copy) {
      if (copy.epoch <= epoch) perform(cta, w, copy, mask);
    });
    for_lanes(mask, [&](int i) {
      Mbarrier& b = signalled_mbarrier(cta, w, o, address[i], name());
      // The copies' writes are ordered before the phase, and no other access of this thread.
      if (cta.races.on) {
        u32& clock = b.clock[size_t(cp_async_agent(cta, w))];
        clock = std::max(clock, epoch);
      }
      arrive(cta, w, o, i, b, 1);
    });
  }
  bool signals(u32 mbarrier) const override {
    bool found = false;
    for_lanes(mask, [&](int i) { found |= address[i] == mbarrier; });
    return found;
  }
  const char* name() const override { return "a cp.async.mbarrier.arrive"; }
};

void track_by_mbarrier(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses at = addresses(w, o.address[0]);
  auto arrival = std::make_unique<CpAsyncArrival>();
  arrival->warp = w.id, arrival->op = o.number, arrival->mask = mask;
  arrival->epoch = w.cp_async.epoch++;
  for_lanes(mask, [&](int i) {
    Mbarrier& b = use_mbarrier(cta, w, o, i, arrival->address[i] = u32(at[i]));
    if (!o.get<TrackOptions>().noinc) expect_one_more(cta, w, o, i, b);
  });
  for_copies(w.cp_async, [&](CpAsyncCopy& copy) { copy.tracked |= mask; });
  if (cta.launch->config.mode == Mode::Early) arrival->complete(cta);
  else cta.in_flight.add(std::move(arrival));
}

}  // namespace

void decode_cp_async(Decoder& d, Instruction& i) {
  const std::string& what = i.word(2);
  Op& op = i.op;
  if (what == "commit_group" || what == "wait_group" || what == "wait_all") {
    d.expect(i, what == "wait_group" ? 1 : 0);
    op.together = Together::All;
    op.imm = what == "wait_group" ? i.operands[0].value : 0;
    op.set<WaitOptions>().all = what == "wait_all";
    op.fn = what == "commit_group" ? commit_group : wait_group;
  } else if (what == "ca" || what == "cg") {
    if (i.operands.size() < 3) d.bad("cp.async operands");
    op.address[0] = d.address(i.operands[0]);
    op.address[1] = d.address(i.operands[1]);
    const s64 bytes = i.operands[2].value;
    if (what == "cg" && bytes != 16) d.bad("cp.async.cg takes 16 bytes");
    if (bytes != 4 && bytes != 8 && bytes != 16) d.bad("cp.async takes 4, 8 or 16 bytes");
    op.set<CopyOptions>().bytes = u8(bytes);
    const size_t operands = i.operands.size() - i.has("L2::cache_hint");  // the last is a policy
    if (operands > 4) d.bad("cp.async operands");
    if (operands > 3) op.s[0] = d.source(i.operands[3], 32);
    op.fn = copy_async;
  } else if (what == "mbarrier" && i.word(3) == "arrive") {
    d.expect(i, 1);
    op.address[0] = d.address(i.operands[0]);
    op.set<TrackOptions>().noinc = i.has("noinc");
    op.fn = track_by_mbarrier;
  }
}

void end_cp_async(Cta& cta, Warp& w) {
  auto awaited = [](const CpAsyncCopy& copy) { return !(copy.mask & ~copy.tracked); };
  auto note = [&](const char* what) { cta.launch->note(format("warp ends with %s that nothing waited for", what)); };
  CpAsyncState& state = w.cp_async;
  if (!std::all_of(state.open.begin(), state.open.end(), awaited)) note("cp.async");
  for (auto& group : state.groups)
    if (!std::all_of(group.copies.begin(), group.copies.end(), awaited)) note("cp.async groups");
}

}  // namespace emu
