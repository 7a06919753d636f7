// tcgen05.cp.32x128b.warpx4, which brings scale factors from shared memory to tensor memory.
#include <cstring>

#include "messages.h"
#include "tcgen05_descriptors.h"
#include "tcgen05_queue.h"

namespace emu {

namespace {

constexpr u32 ROWS = 32, ROW_BYTES = 16, COLUMNS = ROW_BYTES / 4;

// PTX ISA, tcgen05.cp: 32 rows of 128 bits, K-major in groups of 8, to 4 columns of each quarter of the lanes
struct Copy : TensorOperation {
  using TensorOperation::TensorOperation;
  OperandLayout from;
  TensorAddress to{0};

  u32 address_of(u32 row) const { return from.start + row / 8 * from.stride + row % 8 * ROW_BYTES; }
  template <class F>
  void for_cells(F f) const {
    for (u32 column = 0; column < COLUMNS; column++)
      for (u32 lane = 0; lane < TENSOR_LANES; lane += TENSOR_CELL_LANES) f(tensor_cell(lane, to.column + column));
  }
  void wait_in_queue(Cta& cta) override {
    for_cells([&](u32 cell) { tensor_memory(cta).unfinished[cell]++; });
  }
  void perform(Cta& cta, Warp&, const Op&) override {
    TensorMemory& t = tensor_memory(cta);
    for (u32 lane = 0; lane < TENSOR_LANES; lane++)
      memcpy(&t.word(lane, to.column), cta.shared_at(address_of(lane % ROWS)), ROW_BYTES);
    if (was_queued) for_cells([&](u32 cell) { t.unfinished[cell]--; });
  }
  const char* name() const override { return "a tcgen05.cp"; }
};

OperandLayout source_layout(Cta& cta, Warp& w, const Op& o, int lane) {
  // Triton sets the base offset where the start is no multiple of 1024 bytes; only swizzles have use for it.
  const u64 bits = reg<u64>(w, o.s[0])[lane] & ~(7ull << 49);
  const OperandLayout layout = unpack_matrix(cta, w, o, bits, false, false, "the source");
  if (layout.swizzle != Swizzle::None) fail_at(cta, w, o, lane, "tcgen05.cp with a swizzle: not implemented");
  return layout;
}

// Records the accesses, as of the time of the issue.
void record(Cta& cta, Warp& w, const Op& o, const Copy& copy, Agent by) {
  for (u32 row = 0; row < ROWS; row++) {
    race_read(cta, w, o, copy.address_of(row), ROW_BYTES, by);
    async_access(cta, w, o, copy.address_of(row), ROW_BYTES, Access::Read);
  }
  copy.for_cells([&](u32 cell) { tensor_memory(cta).write(cta, w, o, cell, by); });
}

void issue_copy(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const Addresses to = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) {
    auto copy = std::make_unique<Copy>(o, w);
    copy->from = source_layout(cta, w, o, i), copy->to = TensorAddress(u32(to[i]));
    if (copy->to.lane) fail_at(cta, w, o, i, format("tcgen05.cp to lane %u", copy->to.lane));
    tensor_memory(cta).check_columns(cta, w, o, copy->to.column, COLUMNS);
    for (u32 row = 0; row < ROWS; row++) check_shared(cta, w, o, i, copy->address_of(row), ROW_BYTES);
    const Agent by = next_in_order(cta, w, o);
    if (cta.races.on) record(cta, w, o, *copy, by);
    issue_in_order(cta, std::move(copy));
  });
}

}  // namespace

void decode_tensor_copy(Decoder& d, Instruction& i) {
  allow_words(d, i, {"cta_group::1", "32x128b", "warpx4"});
  if (!i.has("cta_group::1") || !i.has("32x128b") || !i.has("warpx4")) d.bad("tcgen05.cp");
  d.expect(i, 2);
  i.op.address[0] = d.address(i.operands[0]);
  i.op.s[0] = d.source(i.operands[1], 64);
  i.op.fn = issue_copy;
}

}  // namespace emu
