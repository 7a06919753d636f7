// tcgen05.mma of one CTA (.kind::f16, .kind::tf32) and tcgen05.commit. Products are exact and sums are rounded to fp32
// one by one. MMAs and commits of a CTA are done in the order of their issue, at times that the mode decides.
#include <algorithm>
#include <cmath>

#include "messages.h"
#include "tcgen05.h"
#include "tcgen05_descriptors.h"

namespace emu {

namespace {

struct MmaOptions {
  bool tf32, a_in_tensor, accumulate_negated;
  u8 scale;  // D is multiplied by 2^-scale before it is added to
};

struct TensorOperation : AsyncOperation {
  static constexpr u32 QUEUE = 0;
  int op, warp;
  bool was_queued = false;

  virtual void perform(Cta& cta, Warp& w, const Op& o) = 0;
  virtual void wait_in_queue(Cta&) {}
  void complete(Cta& cta) override {
    perform(cta, *cta.warps[size_t(warp)], cta.program->ops[size_t(op)]);
    if (was_queued) tensor_memory(cta).queued--;
  }
  u32 queue() const override { return QUEUE; }
};

void issue(Cta& cta, std::unique_ptr<TensorOperation> operation) {
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

// PTX ISA, tcgen05: Data path layout organization: 64 rows take 16 of every 32 lanes.
u32 lane_of_row(const MmaShape& shape, u32 first, u32 row) {
  return first + (shape.m == 128 ? row : row / 16 * 32 + row % 16);
}
// Calls f(cell) for the rows of A or D in some columns.
template <class F>
void for_cells(const MmaShape& shape, TensorAddress at, u32 columns, F f) {
  for (u32 column = 0; column < columns; column++)
    for (u32 row = 0; row < shape.m; row += TENSOR_CELL_LANES)
      f(tensor_cell(lane_of_row(shape, at.lane, row), at.column + column));
}

struct Mma : TensorOperation {
  MmaShape shape;
  Part a, b;
  TensorAddress d{0}, a_address{0};
  bool accumulate;
  u32 disabled[4] = {};  // lanes of D, a bit for each

  u32 a_columns() const { return shape.k * bytes_of(shape.a) / 4; }

  void wait_in_queue(Cta& cta) override {
    TensorMemory& t = tensor_memory(cta);
    for_cells(shape, d, shape.n, [&](u32 cell) { t.unfinished[cell]++; });
  }
  void perform(Cta& cta, Warp& w, const Op& o) override {
    static thread_local float left[16][128], right[16][256];
    TensorMemory& t = tensor_memory(cta);
    if (o.get<MmaOptions>().a_in_tensor) read_tensor(t, left);
    else read_part(cta, w, o, a, &left[0][0], 128);
    read_part(cta, w, o, b, &right[0][0], 256);
    multiply(t, o, left, right);
    if (was_queued) for_cells(shape, d, shape.n, [&](u32 cell) { t.unfinished[cell]--; });
  }
  const char* name() const override { return "a tcgen05.mma"; }

 private:
  void read_tensor(TensorMemory& t, float (*left)[128]) const {
    for (u32 row = 0; row < shape.m; row++) {
      const u32* from = &t.word(lane_of_row(shape, a_address.lane, row), a_address.column);
      for (u32 k = 0; k < shape.k; k++)
        left[k][row] = element(shape.a, reinterpret_cast<const u8*>(from) + k * bytes_of(shape.a));
    }
  }
  void multiply(TensorMemory& t, const Op& o, const float (*left)[128], const float (*right)[256]) const {
    const float sign = shape.negate_a != shape.negate_b ? -1.0f : 1.0f;
    const float scale = std::ldexp(1.0f, -int(o.get<MmaOptions>().scale));
    for (u32 row = 0; row < shape.m; row++) {
      const u32 lane = lane_of_row(shape, d.lane, row);
      if (on(disabled[lane / 32], int(lane % 32))) continue;
      u32* to = &t.word(lane, d.column);
      float sums[256];
      for (u32 n = 0; n < shape.n; n++)
        sums[n] = !accumulate ? 0.0f : scale * (shape.half_d ? FP16::load(u16(to[n])) : from_bits(to[n]));
      for (u32 k = 0; k < shape.k; k++) {
        const float v = sign * left[k][row];
        const float* from = right[k];
#pragma GCC ivdep
        for (u32 n = 0; n < shape.n; n++) sums[n] += v * from[n];
      }
      for (u32 n = 0; n < shape.n; n++) to[n] = shape.half_d ? FP16::store(sums[n]) : to_bits(sums[n]);
    }
  }
};

void check_lanes(Cta& cta, Warp& w, const Op& o, const MmaShape& shape, TensorAddress at, const char* name) {
  if (at.lane != 0 && !(shape.m == 64 && at.lane == 16))
    fail_at(cta, w, o, 0, format("tcgen05.mma: %s in tensor memory from lane %u on with M %u", name, at.lane, shape.m));
}

// Records the accesses, as of the time of the issue.
void record(Cta& cta, Warp& w, const Op& o, const Mma& mma, u32 sequence) {
  TensorMemory& t = tensor_memory(cta);
  const Agent by{tensor_mma_agent(cta), sequence};
  if (t.last_issuer >= 0 && t.last_issuer != w.id &&
      t.last_clock > cta.races.known[size_t(w.id)][size_t(t.last_issuer)])
    cta.launch->note(format("RACE in tensor memory: MMAs of two warps are not ordered: %s, the other: warp %d",
                            where(cta, w, o).c_str(), t.last_issuer));
  t.last_issuer = w.id, t.last_clock = warp_agent(cta, w).clock;
  if (o.get<MmaOptions>().a_in_tensor)
    for_cells(mma.shape, mma.a_address, mma.a_columns(), [&](u32 cell) { t.read(cta, w, o, cell, by); });
  else record_part(cta, w, o, mma.a, by);
  record_part(cta, w, o, mma.b, by);
  for_cells(mma.shape, mma.d, mma.shape.n, [&](u32 cell) { t.write(cta, w, o, cell, by); });
}

void issue_one(Cta& cta, Warp& w, const Op& o, int lane, TensorAddress d, TensorAddress a_address, bool accumulate) {
  const auto& options = o.get<MmaOptions>();
  TensorMemory& t = tensor_memory(cta);
  auto mma = std::make_unique<Mma>();
  const MmaShape shape = unpack_instruction(cta, w, o, options.tf32, reg<u32>(w, o.s[2])[lane]);
  auto operand = [&](u32 source, Element element, bool mn_major, u32 count, const char* name) {
    const u64 bits = reg<u64>(w, source)[lane];
    return Part{unpack_matrix(cta, w, o, bits, options.tf32, mn_major, name), element, mn_major, 0, count, shape.k};
  };
  mma->op = o.number, mma->warp = w.id, mma->shape = shape;
  mma->d = d, mma->a_address = a_address, mma->accumulate = accumulate;
  check_lanes(cta, w, o, shape, d, "D");
  t.check_columns(cta, w, o, d.column, shape.n);
  if (options.a_in_tensor) {
    check_lanes(cta, w, o, shape, a_address, "A");
    if (a_address.lane != d.lane) fail_at(cta, w, o, lane, "tcgen05.mma: A and D start at different lanes");
    if (shape.mn_major_a) fail_at(cta, w, o, lane, "tcgen05.mma: A in tensor memory, transposed");
    t.check_columns(cta, w, o, a_address.column, mma->a_columns());
  } else {
    mma->a = operand(o.s[0], shape.a, shape.mn_major_a, shape.m, "A");
  }
  mma->b = operand(o.s[1], shape.b, shape.mn_major_b, shape.n, "B");
  for (size_t k = 0; k < o.list.size(); k++) mma->disabled[k] = reg<u32>(w, o.list[k].offset)[lane];
  t.issued[size_t(w.id)] = ++t.sequence;
  if (cta.races.on) record(cta, w, o, *mma, t.sequence);
  cta.launch->counters[C_TENSOR_MMA]++;
  cta.launch->counters[C_TENSOR_MACS] += u64(shape.m) * shape.n * shape.k;
  issue(cta, std::move(mma));
}

void issue_mma(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<MmaOptions>();
  const Addresses d = addresses(w, o.address[0]);
  const Addresses a = options.a_in_tensor ? addresses(w, o.address[1]) : Addresses{};
  const u32 accumulate = predicate(w, o.s[3], options.accumulate_negated);
  for_lanes(mask, [&](int i) {
    issue_one(cta, w, o, i, TensorAddress(u32(d[i])), TensorAddress(u32(a[i])), on(accumulate, i));
  });
}

// PTX ISA, tcgen05.commit: an arrival once all that this thread has issued so far is done.
struct Commit : TensorOperation {
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
    auto operation = std::make_unique<Commit>();
    operation->op = o.number, operation->warp = w.id, operation->mbarrier = u32(at[i]);
    use_mbarrier(cta, w, o, i, u32(at[i]));
    if (cta.races.on) {
      // A warp that sees the arrival is ordered after this warp's MMAs and after all that they were ordered after, but
      // not after anything else that this warp has done.
      operation->clock = cta.races.known[size_t(w.id)];
      operation->clock[size_t(w.id)] = 0;
      u32& mmas = operation->clock[size_t(tensor_mma_agent(cta))];
      mmas = std::max(mmas, tensor_memory(cta).issued[size_t(w.id)]);
    }
    issue(cta, std::move(operation));
  });
}

}  // namespace

void decode_tensor_mma(Decoder& d, Instruction& i) {
  allow_words(d, i, {"cta_group::1", "kind::f16", "kind::tf32"});
  auto& options = i.op.set<MmaOptions>();
  options.tf32 = i.has("kind::tf32");
  if (!i.has("cta_group::1") || (!options.tf32 && !i.has("kind::f16")) || i.operands.size() < 5) d.bad("tcgen05.mma");
  i.op.address[0] = d.address(i.operands[0]);
  options.a_in_tensor = i.operands[1].is(Operand::Kind::Address);
  if (options.a_in_tensor) i.op.address[1] = d.address(i.operands[1]);
  else i.op.s[0] = d.source(i.operands[1], 64);
  i.op.s[1] = d.source(i.operands[2], 64);
  i.op.s[2] = d.source(i.operands[3], 32);
  size_t at = 4;
  if (i.operands[at].is(Operand::Kind::Vector)) {
    if (i.operands[at].parts.size() != 4) d.bad("disable-output-lane");
    for (auto& part : i.operands[at++].parts) i.op.list.push_back(d.source_slot(part, 32));
  }
  if (at >= i.operands.size()) d.bad("enable-input-d");
  i.op.s[3] = d.source(i.operands[at], 1), options.accumulate_negated = i.operands[at++].negated;
  if (at < i.operands.size()) {
    const s64 scale = i.operands[at++].value;
    if (scale < 0 || scale > 15) d.bad("scale-input-d");
    options.scale = u8(scale);
  }
  d.expect(i, at);
  i.op.fn = issue_mma;
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
