// The order of tcgen05.mma and cp, and tcgen05.commit.
#include "tcgen05_queue.h"

#include <algorithm>

#include "messages.h"

namespace emu {

namespace {

// PTX ISA, tcgen05.commit: an arrival once all that this thread has issued so far is done.
struct Commit : TensorOperation {
  using TensorOperation::TensorOperation;
  u32 mbarrier;
  std::vector<u32> clock;  // what the arrival orders

  void perform(Cta& cta, Warp& w, const Op& o) override {
    Mbarrier& b = signalled_mbarrier(cta, w, o, mbarrier, "tcgen05.commit");
    for (size_t k = 0; k < clock.size(); k++) b.clock[k] = std::max(b.clock[k], clock[k]);
    arrive(cta, w, o, 0, b, 1);
  }
  bool signals(u32 address) const override { return address == mbarrier; }
  const char* name() const override { return "a tcgen05.commit"; }
};

void commit(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses at = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) {
    auto operation = std::make_unique<Commit>(o, w);
    operation->mbarrier = u32(at[i]);
    use_mbarrier(cta, w, o, i, u32(at[i]));
    if (cta.races.on) {
      // A warp that sees the arrival is ordered after this warp's MMAs and copies and after all that they were ordered
      // after, but not after anything else that this warp has done.
      operation->clock = cta.races.known[size_t(w.id)];
      operation->clock[size_t(w.id)] = 0;
      u32& done = operation->clock[size_t(tensor_mma_agent(cta))];
      done = std::max(done, tensor_memory(cta).issued[size_t(w.id)]);
    }
    issue_in_order(cta, std::move(operation));
  });
}

}  // namespace

void issue_in_order(Cta& cta, std::unique_ptr<TensorOperation> operation) {
  TensorMemory& t = tensor_memory(cta);
  Launch& launch = *cta.launch;
  const Mode mode = launch.config.mode;
  if (mode == Mode::Early || (mode == Mode::Random && !t.queued && (launch.random() & 1)))
    return operation->complete(cta);
  t.queued++;
  operation->was_queued = true;
  operation->wait_in_queue(cta);
  cta.in_flight.add(std::move(operation));
}

Agent next_in_order(Cta& cta, Warp& w, const Op& o) {
  TensorMemory& t = tensor_memory(cta);
  const Agent by{tensor_mma_agent(cta), t.issued[size_t(w.id)] = ++t.sequence};
  if (!cta.races.on) return by;
  if (t.last_issuer >= 0 && t.last_issuer != w.id &&
      t.last_clock > cta.races.known[size_t(w.id)][size_t(t.last_issuer)])
    cta.launch->note(
        format("RACE in tensor memory: MMAs or copies of two warps are not ordered: %s, the other: warp %d",
               where(cta, w, o).c_str(), t.last_issuer));
  t.last_issuer = w.id, t.last_clock = warp_agent(cta, w).clock;
  return by;
}

// Without a state space the ISA wants a generic address. Triton 3.6 writes one of shared memory there, in all kernels.
void decode_tensor_commit(Decoder& d, Instruction& i) {
  allow_words(d, i, {"cta_group::1", "mbarrier::arrive::one", "shared::cluster", "b64"});
  if (!i.has("cta_group::1") || !i.has("mbarrier::arrive::one")) d.bad("tcgen05.commit");
  d.expect(i, 1);
  i.op.address[0] = d.address(i.operands[0]);
  i.op.fn = commit;
}

}  // namespace emu
