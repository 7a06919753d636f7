// mma.sync of 16x8 tiles with fp32 accumulators; products.h says how they are added.
#include "families.h"
#include "messages.h"
#include "products.h"

namespace emu {

namespace {

struct MmaOptions {
  Element a, b;
  u8 depth, a_registers;
  bool scaled;
  u8 byte_a, byte_b;  // of the registers with scale factors
};

// PTX ISA, Block Scaling for mma.sync, .scale_vec::1X with thread-id 0: of each four lanes the first two hold the
// factors of two rows of A, and the first that of a column of B.
float factor_of_row(const u32* factors, int byte, int row) {
  return UE8M0::load(u8(factors[4 * (row % 8) + row / 8] >> 8 * byte));
}
float factor_of_column(const u32* factors, int byte, int column) {
  return UE8M0::load(u8(factors[4 * column] >> 8 * byte));
}

// The list holds 4 registers of D, those of A, those of B (half as many), 4 of C, and those of scale factors.
void mma(Cta& cta, Warp& w, const Op& o, u32) {
  const auto& options = o.get<MmaOptions>();
  const int b_registers = options.a_registers / 2, each = 4 / int(bytes_of(options.b));
  const Slot *d = &o.list[0], *a_slots = d + 4, *b_slots = a_slots + options.a_registers,
             *c_slots = b_slots + b_registers;
  float a[16][32], b[32][8], c[16][8];
  for_fragment_a(w, a_slots, options.a_registers, options.a, [&](int row, int k, float v) { a[row][k] = v; });
  for (int i = 0; i < LANES; i++) {
    const int column = i / 4, t = i % 4;
    for (int r = 0; r < b_registers; r++) {
      const u32 bits = reg<u32>(w, b_slots[r].offset)[i];
      for_elements(options.b, bits, [&](int n, float v) { b[each * (t + r * 4) + n][column] = v; });
    }
    for (int r = 0; r < 4; r++) c[row_of_d(i, r)][column_of_d(i, r)] = reg<float>(w, c_slots[r].offset)[i];
  }
  float sums[16][8] = {};
  auto& to = options.scaled ? sums : c;
  const SumBits bits = sum_bits(cta, options.a);
  if (bits.terms && options.scaled) fail_at(cta, w, o, 0, "mma block_scale: truncated sums are not implemented");
  for (int row = 0; row < 16; row++)
    add_products({a[row], b[0], 1, 8, options.depth, 8, options.a, options.b}, bits, to[row]);
  if (options.scaled) {
    const u32 *of_a = reg<u32>(w, c_slots[4].offset), *of_b = reg<u32>(w, c_slots[5].offset);
    for (int row = 0; row < 16; row++)
      for (int column = 0; column < 8; column++) {
        const double scaled_row = double(sums[row][column]) * factor_of_row(of_a, options.byte_a, row);
        c[row][column] += float(scaled_row * factor_of_column(of_b, options.byte_b, column));
      }
  }
  for (int i = 0; i < LANES; i++)
    for (int r = 0; r < 4; r++) reg<float>(w, d[r].offset)[i] = c[row_of_d(i, r)][column_of_d(i, r)];
  cta.launch->counters[C_MMA]++;
  cta.launch->counters[C_MMA_MACS] += u64(16 * 8 * options.depth);
}

// {byte-id, thread-id} of a register with scale factors
u8 byte_of_factors(Decoder& d, const Operand& selector) {
  const auto& parts = selector.parts;
  for (auto& part : parts)
    if (!part.is(Operand::Kind::Constant)) d.bad("mma scale selector");
  if (parts.size() != 2 || parts[0].value < 0 || parts[0].value > 3 || parts[1].value) d.bad("mma scale selector");
  return u8(parts[0].value);
}

}  // namespace

void decode_mma(Decoder& d, Instruction& i) {
  static const std::map<std::string, int> depths = {{"m16n8k32", 32}, {"m16n8k16", 16}, {"m16n8k8", 8}, {"m16n8k4", 4}};
  const auto types = i.types();
  const bool scaled = i.has("block_scale");
  if (scaled) {
    for (const char* word : {"kind::mxf8f6f4", "scale_vec::1X", "m16n8k32", "ue8m0"})
      if (!i.has(word)) d.bad("mma block_scale");
  }
  int depth = 0;
  for (auto& word : i.words)
    if (depths.count(word)) depth = depths.at(word);
  if (!i.has("row") || !i.has("col") || types.size() != 4 || types[0] != Type::F32 || types[3] != Type::F32)
    d.bad("mma");
  const Element a = element_of(types[1]), b = element_of(types[2]);
  if (!are_factors(a, b)) d.bad("mma type");
  const size_t row_bytes = size_t(depth) * bytes_of(a);
  if (row_bytes != 16 && row_bytes != 32) d.bad("mma shape");
  if (scaled && !is_8_bit(a)) d.bad("mma block_scale");
  d.expect(i, scaled ? 8 : 4);
  const size_t a_registers = 16 * row_bytes / 4 / LANES;
  const size_t counts[] = {4, a_registers, a_registers / 2, 4};
  for (size_t k = 0; k < 4; k++) {
    if (i.operands[k].parts.size() != counts[k]) d.bad("mma registers");
    for (auto& part : i.operands[k].parts)
      i.op.list.push_back(k == 0 ? d.destination_slot(part, 32) : d.source_slot(part, 32));
  }
  auto& options = i.op.set<MmaOptions>() = {a, b, u8(depth), u8(a_registers), scaled, 0, 0};
  if (scaled) {
    for (size_t k : {4, 6}) i.op.list.push_back(d.source_slot(i.operands[k], 32));
    options.byte_a = byte_of_factors(d, i.operands[5]), options.byte_b = byte_of_factors(d, i.operands[7]);
  }
  i.op.together = Together::All;
  i.op.fn = mma;
}

}  // namespace emu
