// mma.sync of 16x8 tiles with fp32 accumulators: products are exact and sums are rounded to fp32 one by one, which the
// tensor cores do not do, so that results agree up to that rounding.
#include "families.h"
#include "matrix_elements.h"

namespace emu {

namespace {

struct MmaOptions {
  Element a, b;
  u8 depth, a_registers;
};

// The list holds 4 registers of D, those of A, those of B (half as many), and 4 of C.
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
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < options.depth; k++)
      for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < LANES; i++)
    for (int r = 0; r < 4; r++) reg<float>(w, d[r].offset)[i] = c[row_of_d(i, r)][column_of_d(i, r)];
  cta.launch->counters[C_MMA]++;
  cta.launch->counters[C_MMA_MACS] += u64(16 * 8 * options.depth);
}

}  // namespace

void decode_mma(Decoder& d, Instruction& i) {
  static const std::map<std::string, int> depths = {{"m16n8k32", 32}, {"m16n8k16", 16}, {"m16n8k8", 8}, {"m16n8k4", 4}};
  const auto types = i.types();
  int depth = 0;
  for (auto& word : i.words)
    if (depths.count(word)) depth = depths.at(word);
  if (!i.has("row") || !i.has("col") || types.size() != 4 || types[0] != Type::F32 || types[3] != Type::F32)
    d.bad("mma");
  const Element a = element_of(types[1]), b = element_of(types[2]);
  if (!are_factors(a, b)) d.bad("mma type");
  const size_t row_bytes = size_t(depth) * bytes_of(a);
  if (row_bytes != 16 && row_bytes != 32) d.bad("mma shape");
  d.expect(i, 4);
  const size_t a_registers = 16 * row_bytes / 4 / LANES;
  const size_t counts[] = {4, a_registers, a_registers / 2, 4};
  for (size_t k = 0; k < 4; k++) {
    if (i.operands[k].parts.size() != counts[k]) d.bad("mma registers");
    for (auto& part : i.operands[k].parts)
      i.op.list.push_back(k == 0 ? d.destination_slot(part, 32) : d.source_slot(part, 32));
  }
  i.op.set<MmaOptions>() = {a, b, u8(depth), u8(a_registers)};
  i.op.together = Together::All;
  i.op.fn = mma;
}

}  // namespace emu
