// mbarrier.init, inval, arrive, expect_tx, try_wait and test_wait.
#include "mbarriers.h"

#include "decoder.h"
#include "lanes.h"
#include "messages.h"

namespace emu {

namespace {

// PTX ISA, mbarrier: Contents of the mbarrier object: the most arrivals, and the most bytes
constexpr u32 MAX_COUNT = (1u << 20) - 1;

const Mbarrier* find(const Cta& cta, u32 address) {
  auto found = cta.mbarriers.at.find(address);
  return found == cta.mbarriers.at.end() || !found->second.valid ? nullptr : &found->second;
}

// PTX ISA, mbarrier: Phase of the mbarrier object: it is complete when arrivals and no bytes are pending.
void try_complete(Cta& cta, Mbarrier& b) {
  if (b.pending != 0 || b.transactions != 0) return;
  b.phase++;
  b.pending = b.expected;
  if (!cta.races.on) return;
  b.done = b.clock;
  b.done[size_t(mbarrier_agent(cta, b.number))] = u32(b.phase);
}

// Notes a use that is not ordered after the init.
void check_order(Cta& cta, Warp& w, const Op& o, Mbarrier& b) {
  if (!cta.races.on) return;
  const auto& known = cta.races.known[size_t(w.id)];
  if (b.init_warp != w.id && known[size_t(b.init_warp)] < b.init_clock)
    cta.launch->note(
        format("RACE on an mbarrier: used by a warp that is not ordered after its init: %s", where(cta, w, o).c_str()));
  b.used[size_t(w.id)] = known[size_t(w.id)];
}
// Notes an end that is not ordered after every use.
void check_order_of_end(Cta& cta, Warp& w, const Op& o, const Mbarrier& b) {
  if (!cta.races.on) return;
  const auto& known = cta.races.known[size_t(w.id)];
  for (size_t k = 0; k < cta.warps.size(); k++)
    if (int(k) != w.id && b.used[k] > known[k])
      cta.launch->note(format("RACE on an mbarrier: inval that is not ordered after a use: %s, use by warp %d",
                              where(cta, w, o).c_str(), int(k)));
}

void init_one(Cta& cta, Warp& w, const Op& o, int lane, u32 address, u32 count) {
  check_shared(cta, w, o, lane, address, 8);
  if (address % 8) fail_at(cta, w, o, lane, "mbarrier: misaligned");
  if (count < 1 || count > MAX_COUNT) fail_at(cta, w, o, lane, "mbarrier: count");
  if (find(cta, address)) fail_at(cta, w, o, lane, "mbarrier.init of a barrier that is in use");
  auto [entry, is_new] = cta.mbarriers.at.try_emplace(address);
  const int number = is_new ? cta.mbarriers.count++ : entry->second.number;
  Mbarrier& b = entry->second = {};
  b.expected = b.pending = count, b.valid = true, b.number = number;
  if (cta.races.on) {
    if (number >= MAX_TRACKED_MBARRIERS) fail_at(cta, w, o, lane, "too many mbarriers for the search for races");
    b.clock.assign(size_t(cta.races.agents), 0), b.done.assign(size_t(cta.races.agents), 0);
    b.used.assign(cta.warps.size(), 0);
    b.init_warp = w.id, b.init_clock = warp_agent(cta, w).clock;
    b.init_unfenced = true;
    forget_writes(cta, mbarrier_agent(cta, number));  // its phases start anew
  }
  shared_write(cta, w, o, address, 8);
  memset(cta.shared_at(address), 0, 8);
}
void init(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses at = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) { init_one(cta, w, o, i, u32(at[i]), reg<u32>(w, o.s[0])[i]); });
}

void invalidate(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses at = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) {
    Mbarrier& b = use_mbarrier(cta, w, o, i, u32(at[i]));
    check_order_of_end(cta, w, o, b);
    if (b.transactions != 0 || b.pending != b.expected)
      cta.launch->note(format("mbarrier.inval in the middle of a phase (pending %u of %u, tx %lld): %s", b.pending,
                              b.expected, (long long)b.transactions, where(cta, w, o).c_str()));
    if (auto* operation = cta.in_flight.signalling(u32(at[i])))
      fail_at(cta, w, o, i, format("mbarrier.inval while %s is on its way", operation->name()));
    b.valid = false;
  });
}

struct ArriveOptions {
  bool expects;  // .expect_tx
  bool arrives;
};
void arrive_or_expect(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<ArriveOptions>();
  const Addresses at = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) {
    Mbarrier& b = use_mbarrier(cta, w, o, i, u32(at[i]));
    const u32 value = o.s[0] == NONE ? 1 : reg<u32>(w, o.s[0])[i];  // a count, or with .expect_tx bytes
    if (options.expects) b.transactions += value;
    if (b.transactions > s64(MAX_COUNT)) fail_at(cta, w, o, i, "mbarrier: more bytes than a phase can expect");
    if (!options.arrives) return try_complete(cta, b);
    if (o.d[0] != NONE) reg<u64>(w, o.d[0])[i] = b.phase;
    release(cta, w, b.clock);
    arrive(cta, w, o, i, b, options.expects ? 1 : value);
  });
}

void test_wait(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses at = addresses(w, o.address[0]);
  const u32* parity = reg<u32>(w, o.s[0]);
  u32 ready = 0;
  for_lanes(mask, [&](int i) {
    const u32 address = u32(at[i]);
    if (!find(cta, address))
      fail_at(cta, w, o, i, format("wait on no mbarrier at shared offset %d", int(address) - int(SHARED_BASE)));
    Mbarrier& b = use_mbarrier(cta, w, o, i, address);
    if (parity[i] > 1) fail_at(cta, w, o, i, format("mbarrier parity %u", parity[i]));
    if (wait_is_over(cta, address, parity[i])) {
      ready |= 1u << i;
      acquire(cta, w, b.done);
    } else {
      w.mbarrier_address = address, w.mbarrier_parity = parity[i];
    }
  });
  set_predicate(w, o.d[0], mask, ready);
}

void decode_arrive(Decoder& d, Instruction& i) {
  if (i.operands.size() < 2) d.bad("mbarrier operands");
  const Operand& state = i.operands[0];
  if (state.is(Operand::Kind::Register)) i.op.d[0] = d.destination(state, 64);
  else if (!state.is(Operand::Kind::Sink)) d.bad("mbarrier state");
  i.op.address[0] = d.address(i.operands[1]);
  if (i.operands.size() > 2) i.op.s[0] = d.source(i.operands[2], 32);
  i.op.set<ArriveOptions>() = {i.has("expect_tx"), true};
  i.op.fn = arrive_or_expect;
}

void decode_wait(Decoder& d, Instruction& i) {
  if (!i.has("parity")) d.bad("mbarrier wait by state");
  if (i.operands.size() < 3) d.bad("mbarrier wait");
  i.op.d[0] = d.destination(i.operands[0], 1);
  i.op.address[0] = d.address(i.operands[1]);
  i.op.s[0] = d.source(i.operands[2], 32);
  if (i.word(1) == "try_wait") i.op.kind = Kind::MbarrierWait;
  i.op.fn = test_wait;
}

}  // namespace

void decode_mbarrier(Decoder& d, Instruction& i) {
  const std::string& what = i.word(1);
  if (i.operands.empty()) return;
  if (what == "arrive") return decode_arrive(d, i);
  if (what == "try_wait" || what == "test_wait") return decode_wait(d, i);
  if (what != "init" && what != "inval" && what != "expect_tx") return;
  i.op.address[0] = d.address(i.operands[0]);
  if (what == "inval") {
    i.op.fn = invalidate;
    return;
  }
  d.expect(i, 2);
  i.op.s[0] = d.source(i.operands[1], 32);
  i.op.set<ArriveOptions>() = {true, false};
  i.op.fn = what == "init" ? init : arrive_or_expect;
}

Mbarrier& use_mbarrier(Cta& cta, Warp& w, const Op& o, int lane, u32 address) {
  if (!find(cta, address))
    fail_at(cta, w, o, lane, format("no mbarrier at shared offset %d", int(address) - int(SHARED_BASE)));
  Mbarrier& b = cta.mbarriers.at[address];
  check_order(cta, w, o, b);
  return b;
}

Mbarrier& signalled_mbarrier(Cta& cta, Warp& w, const Op& o, u32 address, const char* what) {
  if (!find(cta, address)) fail_at(cta, w, o, 0, format("%s completes on no mbarrier", what));
  return cta.mbarriers.at[address];
}

void arrive(Cta& cta, Warp& w, const Op& o, int lane, Mbarrier& b, u32 count) {
  if (count > b.pending) fail_at(cta, w, o, lane, "mbarrier: more arrivals than it expects in this phase");
  b.pending -= count;
  try_complete(cta, b);
}

void expect_one_more(Cta& cta, Warp& w, const Op& o, int lane, Mbarrier& b) {
  if (++b.pending > MAX_COUNT) fail_at(cta, w, o, lane, "mbarrier: count");
}

void complete_transactions(Cta& cta, Mbarrier& b, s64 bytes) {
  b.transactions -= bytes;
  try_complete(cta, b);
}

bool wait_is_over(const Cta& cta, u32 address, u32 parity) {
  const Mbarrier* b = find(cta, address);
  return !b || (b->phase & 1) != (parity & 1);  // without an mbarrier, the instruction will say so when it runs
}

void fence_mbarrier_inits(Cta& cta, const Warp& w) {
  if (!cta.races.on) return;
  const auto& known = cta.races.known[size_t(w.id)];
  for (auto& [address, b] : cta.mbarriers.at)
    if (b.init_unfenced && b.init_clock <= known[size_t(b.init_warp)]) b.init_unfenced = false;
}

// CUTLASS has fence.mbarrier_init after the inits and the CUDA guide fence.proxy.async, both before a barrier. Triton's
// pipelines have the barrier alone, which is enough within a CTA: TMA must not come before any of the three.
void check_init_visible(Cta& cta, Warp& w, const Op& o, Mbarrier& b) {
  if (!cta.races.on || !b.init_unfenced) return;
  cta.launch->note(
      format("PROXY: a TMA load uses an mbarrier that was initialised without a fence since, nor a barrier"
             ": %s",
             where(cta, w, o).c_str()));
  b.init_unfenced = false;
}

void end_mbarriers(Cta& cta) {
  for (auto& [address, b] : cta.mbarriers.at)
    if (b.valid && b.transactions)
      cta.launch->note(format("a CTA of %s ends with bytes pending on an mbarrier", cta.program->name.c_str()));
}

}  // namespace emu
