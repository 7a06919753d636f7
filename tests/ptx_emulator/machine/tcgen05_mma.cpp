// tcgen05.mma of one CTA (.kind::f16, tf32, f8f6f4 and mxf8f6f4.block_scale); products.h says how products are added.
// With scale factors, first those of the products without D.
#include <cmath>

#include "messages.h"
#include "products.h"
#include "tcgen05_descriptors.h"
#include "tcgen05_queue.h"
#include "tcgen05_scales.h"

namespace emu {

namespace {

struct MmaOptions {
  MmaKind kind;
  bool a_in_tensor, accumulate_negated;
  u8 scale;  // D is multiplied by 2^-scale before it is added to
};

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
  using TensorOperation::TensorOperation;
  MmaShape shape;
  Part a, b;
  TensorAddress d{0}, a_address{0};
  ScaleFactors scale_a, scale_b;  // of no rows, without block_scale
  bool accumulate;
  u32 disabled[4] = {};  // lanes of D, a bit for each

  u32 a_columns() const { return shape.k * bytes_of(shape.a) / 4; }

  void wait_in_queue(Cta& cta) override {
    TensorMemory& t = tensor_memory(cta);
    for_cells(shape, d, shape.n, [&](u32 cell) { t.unfinished[cell]++; });
  }
  void perform(Cta& cta, Warp& w, const Op& o) override {
    static thread_local float left[32][128], right[32][256];
    TensorMemory& t = tensor_memory(cta);
    if (o.get<MmaOptions>().a_in_tensor) read_tensor(t, left);
    else read_part(cta, w, o, a, &left[0][0], 128);
    read_part(cta, w, o, b, &right[0][0], 256);
    const SumBits bits = sum_bits(cta, shape.a);
    if (bits.terms && scale_a.count)
      fail_at(cta, w, o, 0, "tcgen05.mma block_scale: truncated sums are not implemented");
    multiply(t, o, bits, left, right);
    if (was_queued) for_cells(shape, d, shape.n, [&](u32 cell) { t.unfinished[cell]--; });
  }
  const char* name() const override { return "a tcgen05.mma"; }

 private:
  float scaled(TensorMemory& t, u32 quarter, u32 row, u32 column, float sum) const {
    return float(double(sum) * scale_a.factor(t, quarter, row) * scale_b.factor(t, quarter, column));
  }
  void read_tensor(TensorMemory& t, float (*left)[128]) const {
    for (u32 row = 0; row < shape.m; row++) {
      const u32* from = &t.word(lane_of_row(shape, a_address.lane, row), a_address.column);
      for (u32 k = 0; k < shape.k; k++)
        left[k][row] = element(shape.a, reinterpret_cast<const u8*>(from) + k * bytes_of(shape.a));
    }
  }
  void multiply(TensorMemory& t, const Op& o, SumBits bits, const float (*left)[128], const float (*right)[256]) const {
    const float sign = shape.negate_a != shape.negate_b ? -1.0f : 1.0f;
    const float scale = std::ldexp(1.0f, -int(o.get<MmaOptions>().scale));
    for (u32 row = 0; row < shape.m; row++) {
      const u32 lane = lane_of_row(shape, d.lane, row);
      if (on(disabled[lane / 32], int(lane % 32))) continue;
      u32* to = &t.word(lane, d.column);
      auto before = [&](u32 n) {
        return !accumulate ? 0.0f : scale * (shape.half_d ? FP16::load(u16(to[n])) : from_bits(to[n]));
      };
      float sums[256] = {};
      if (!scale_a.count)
        for (u32 n = 0; n < shape.n; n++) sums[n] = before(n);
      add_products({&left[0][row], right[0], 128, 256, shape.k, shape.n, shape.a, shape.b, sign}, bits, sums);
      if (scale_a.count)
        for (u32 n = 0; n < shape.n; n++) sums[n] = before(n) + scaled(t, lane / 32, row, n, sums[n]);
      for (u32 n = 0; n < shape.n; n++) to[n] = shape.half_d ? FP16::store(sums[n]) : to_bits(sums[n]);
    }
  }
};

void check_lanes(Cta& cta, Warp& w, const Op& o, const MmaShape& shape, TensorAddress at, const char* name) {
  if (at.lane != 0 && !(shape.m == 64 && at.lane == 16))
    fail_at(cta, w, o, 0, format("tcgen05.mma: %s in tensor memory from lane %u on with M %u", name, at.lane, shape.m));
}

// Records the accesses, as of the time of the issue.
void record(Cta& cta, Warp& w, const Op& o, const Mma& mma, Agent by) {
  TensorMemory& t = tensor_memory(cta);
  auto read = [&](u32 cell) { t.read_operand(cta, w, o, cell, by); };
  mma.scale_a.for_cells(read), mma.scale_b.for_cells(read);
  if (o.get<MmaOptions>().a_in_tensor) for_cells(mma.shape, mma.a_address, mma.a_columns(), read);
  else record_part(cta, w, o, mma.a, by);
  record_part(cta, w, o, mma.b, by);
  for_cells(mma.shape, mma.d, mma.shape.n, [&](u32 cell) { t.write(cta, w, o, cell, by); });
}

ScaleFactors scale_factors(Cta& cta, Warp& w, const Op& o, TensorAddress at, u32 byte, u32 count) {
  if (at.lane) fail_at(cta, w, o, 0, format("tcgen05.mma: scale factors from lane %u on", at.lane));
  const ScaleFactors factors{at, byte, count};
  tensor_memory(cta).check_columns(cta, w, o, at.column, factors.columns());
  return factors;
}

// `at`: the addresses of D, of A in tensor memory, of the scale factors of A and B
void issue_one(Cta& cta, Warp& w, const Op& o, int lane, const TensorAddress (&at)[4], bool accumulate) {
  const auto& options = o.get<MmaOptions>();
  TensorMemory& t = tensor_memory(cta);
  const TensorAddress d = at[0], a_address = at[1];
  auto mma = std::make_unique<Mma>(o, w);
  const MmaShape shape = unpack_instruction(cta, w, o, options.kind, reg<u32>(w, o.s[2])[lane]);
  auto operand = [&](u32 source, Element element, bool mn_major, u32 count, const char* name) {
    const u64 bits = reg<u64>(w, source)[lane];
    const bool tf32 = options.kind == MmaKind::TF32;
    return Part{unpack_matrix(cta, w, o, bits, tf32, mn_major, name), element, mn_major, 0, count, shape.k};
  };
  mma->shape = shape, mma->d = d, mma->a_address = a_address, mma->accumulate = accumulate;
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
  if (options.kind == MmaKind::MXF8) {
    mma->scale_a = scale_factors(cta, w, o, at[2], shape.scale_byte_a, shape.m);
    mma->scale_b = scale_factors(cta, w, o, at[3], shape.scale_byte_b, shape.n);
  }
  for (size_t k = 0; k < o.list.size(); k++) mma->disabled[k] = reg<u32>(w, o.list[k].offset)[lane];
  const Agent by = next_in_order(cta, w, o);
  if (cta.races.on) record(cta, w, o, *mma, by);
  cta.launch->counters[C_TENSOR_MMA]++;
  cta.launch->counters[C_TENSOR_MACS] += u64(shape.m) * shape.n * shape.k;
  issue_in_order(cta, std::move(mma));
}

void issue_mma(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<MmaOptions>();
  Addresses at[4] = {};
  for (int k = 0; k < 4; k++)
    if (o.address[k].base != NONE) at[k] = addresses(w, o.address[k]);
  const u32 accumulate = predicate(w, o.s[3], options.accumulate_negated);
  for_lanes(mask, [&](int i) {
    auto of_lane = [&](int k) { return TensorAddress(u32(at[k][i])); };
    issue_one(cta, w, o, i, {of_lane(0), of_lane(1), of_lane(2), of_lane(3)}, on(accumulate, i));
  });
}

}  // namespace

void decode_tensor_mma(Decoder& d, Instruction& i) {
  static const std::map<std::string, MmaKind> kinds = {{"kind::f16", MmaKind::F16},
                                                       {"kind::tf32", MmaKind::TF32},
                                                       {"kind::f8f6f4", MmaKind::F8},
                                                       {"kind::mxf8f6f4", MmaKind::MXF8}};
  allow_words(d, i,
              {"cta_group::1", "kind::f16", "kind::tf32", "kind::f8f6f4", "kind::mxf8f6f4", "block_scale",
               "scale_vec::1X", "block32"});
  auto& options = i.op.set<MmaOptions>();
  for (auto& word : i.words)
    if (auto found = kinds.find(word); found != kinds.end()) options.kind = found->second;
  const bool scaled = options.kind == MmaKind::MXF8;
  if (!i.has("cta_group::1") || options.kind == MmaKind::None || i.operands.size() < (scaled ? 7 : 5))
    d.bad("tcgen05.mma");
  if (scaled != i.has("block_scale")) d.bad("block_scale");
  if (!scaled && (i.has("scale_vec::1X") || i.has("block32"))) d.bad("block_scale");
  i.op.address[0] = d.address(i.operands[0]);
  options.a_in_tensor = i.operands[1].is(Operand::Kind::Address);
  if (options.a_in_tensor) i.op.address[1] = d.address(i.operands[1]);
  else i.op.s[0] = d.source(i.operands[1], 64);
  i.op.s[1] = d.source(i.operands[2], 64);
  i.op.s[2] = d.source(i.operands[3], 32);
  size_t at = 4;
  if (scaled) {
    for (size_t k = 2; k < 4; k++) i.op.address[k] = d.address(i.operands[at++]);
  } else if (i.operands[at].is(Operand::Kind::Vector)) {
    if (i.operands[at].parts.size() != 4) d.bad("disable-output-lane");
    for (auto& part : i.operands[at++].parts) i.op.list.push_back(d.source_slot(part, 32));
  }
  if (at >= i.operands.size()) d.bad("enable-input-d");
  i.op.s[3] = d.source(i.operands[at], 1), options.accumulate_negated = i.operands[at++].negated;
  if (!scaled && at < i.operands.size()) {
    const s64 scale = i.operands[at++].value;
    if (scale < 0 || scale > 15) d.bad("scale-input-d");
    options.scale = u8(scale);
  }
  d.expect(i, at);
  i.op.fn = issue_mma;
}

}  // namespace emu
