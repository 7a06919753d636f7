// ldmatrix and stmatrix: 8x8 matrices of 16-bit elements between shared memory and registers.
// PTX ISA, ldmatrix: the lanes 8k...8k+7 hold the addresses of the rows of matrix k; lane i holds elements 2(i % 4) and
// 2(i % 4) + 1 of row i / 4, or of column i / 4 with .trans.
#include "banks.h"
#include "families.h"
#include "messages.h"

namespace emu {

namespace {

struct MatrixOptions {
  u8 count;
  bool transposed;
};

using Matrix = u16[8][8];

u16& element(Matrix& m, bool transposed, int line, int k) { return transposed ? m[k][line] : m[line][k]; }

u32 row_address(Cta& cta, Warp& w, const Op& o, int lane, u64 address) {
  check_shared(cta, w, o, lane, u32(address), 16);
  if (address % 16) fail_at(cta, w, o, lane, "ldmatrix or stmatrix: misaligned row");
  return u32(address);
}

void load(Cta& cta, Warp& w, const Op& o, u32) {
  const auto& options = o.get<MatrixOptions>();
  const Addresses at = addresses(w, o.address[0]);
  Matrix matrices[4];
  for (int k = 0; k < options.count; k++)
    for (int r = 0; r < 8; r++) {
      u32 address = row_address(cta, w, o, 8 * k + r, at[8 * k + r]);
      shared_read(cta, w, o, address, 16);
      memcpy(matrices[k][r], cta.shared_at(address), 16);
    }
  for (int k = 0; k < options.count; k++)
    for (int i = 0; i < LANES; i++) {
      auto value = [&](int e) { return element(matrices[k], options.transposed, i / 4, 2 * (i % 4) + e); };
      reg<u32>(w, o.list[size_t(k)].offset)[i] = u32(value(1)) << 16 | value(0);
    }
  count_matrix_conflicts(cta, o, at, options.count);
}

void store(Cta& cta, Warp& w, const Op& o, u32) {
  const auto& options = o.get<MatrixOptions>();
  const Addresses at = addresses(w, o.address[0]);
  for (int k = 0; k < options.count; k++) {
    Matrix matrix;
    for (int i = 0; i < LANES; i++) {
      u32 v = reg<u32>(w, o.list[size_t(k)].offset)[i];
      for (int e = 0; e < 2; e++) element(matrix, options.transposed, i / 4, 2 * (i % 4) + e) = u16(v >> 16 * e);
    }
    for (int r = 0; r < 8; r++) {
      u32 address = row_address(cta, w, o, 8 * k + r, at[8 * k + r]);
      bool same = memcmp(cta.shared_at(address), matrix[r], 16) == 0;
      shared_write(cta, w, o, address, 16, same ? WriteKind::Same : WriteKind::Plain);
      memcpy(cta.shared_at(address), matrix[r], 16);
    }
  }
  count_matrix_conflicts(cta, o, at, options.count);
}

}  // namespace

void decode_matrix_load_store(Decoder& d, Instruction& i) {
  const bool is_load = i.name() == "ldmatrix";
  const int count = i.has("x1") ? 1 : i.has("x2") ? 2 : i.has("x4") ? 4 : 0;
  if (!count || !i.has("m8n8") || !i.has("b16") || space_of(i) != Space::Shared) d.bad("matrix shape");
  d.expect(i, 2);
  const auto elements = i.operands[is_load ? 0 : 1].elements();
  if (int(elements.size()) != count) d.bad("matrix registers");
  for (auto& e : elements) i.op.list.push_back(is_load ? d.destination_slot(e, 32) : d.source_slot(e, 32));
  i.op.address[0] = d.address(i.operands[is_load ? 1 : 0]);
  i.op.set<MatrixOptions>() = {u8(count), i.has("trans")};
  i.op.together = Together::All;
  i.op.fn = is_load ? load : store;
}

}  // namespace emu
