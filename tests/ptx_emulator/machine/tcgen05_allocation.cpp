// tcgen05.alloc, dealloc and relinquish_alloc_permit: columns of tensor memory, whose first one alloc writes to shared
// memory. Other CTAs of a multiprocessor have tensor memory of their own here, so that an alloc never waits.
#include <algorithm>
#include <bit>

#include "messages.h"
#include "tcgen05.h"

namespace emu {

namespace {

// In mode late the highest columns that are free, so that a kernel that takes the first one for 0 is wrong.
u32 first_free(const TensorMemory& t, u32 count, bool highest) {
  u32 found = NONE;
  for (u32 first = 0; first + count <= TENSOR_COLUMNS; first += count) {
    const u32 *from = t.owner + first / TENSOR_UNIT, *to = from + count / TENSOR_UNIT;
    if (std::all_of(from, to, [](u32 owner) { return owner == 0; }) && (highest || found == NONE)) found = first;
  }
  return found;
}

void alloc(Cta& cta, Warp& w, const Op& o, u32 mask) {
  TensorMemory& t = tensor_memory(cta);
  const u32 at = uniform(cta, w, o, mask, addresses(w, o.address[0]).at, "the address");
  const u32 count = reg<u32>(w, o.s[0])[__builtin_ctz(mask)];
  check_shared(cta, w, o, 0, at, 4);
  if (at % 4) fail_at(cta, w, o, 0, "tcgen05.alloc: misaligned destination");
  if (count < TENSOR_UNIT || count > TENSOR_COLUMNS || !std::has_single_bit(count))
    fail_at(cta, w, o, 0, format("tcgen05.alloc of %u columns", count));
  if (t.relinquished) fail_at(cta, w, o, 0, "tcgen05.alloc after relinquish_alloc_permit");
  if (t.last_size && count > t.last_size)
    fail_at(cta, w, o, 0, format("tcgen05.alloc of %u columns after one of %u", count, t.last_size));
  const u32 first = first_free(t, count, cta.launch->config.mode == Mode::Late);
  if (first == NONE)
    fail_at(cta, w, o, 0, format("tcgen05.alloc of %u columns waits for ever: the CTA holds the others", count));
  t.last_size = count;
  std::fill_n(t.owner + first / TENSOR_UNIT, count / TENSOR_UNIT, 1 + first);
  t.size[first / TENSOR_UNIT] = count;
  for (u32 lane = 0; lane < TENSOR_LANES; lane++) std::fill_n(&t.word(lane, first), count, TENSOR_NAN);
  t.forget(cta, first, count);
  // This write needs no proxy fence: Triton lets TMA overwrite it without one, after all threads have read it.
  race_write(cta, w, o, at, 4, cta.races.on ? warp_agent(cta, w) : Agent{});
  memcpy(cta.shared_at(at), &first, 4);
}

void dealloc(Cta& cta, Warp& w, const Op& o, u32 mask) {
  TensorMemory& t = tensor_memory(cta);
  u64 addresses[LANES];
  for (int i = 0; i < LANES; i++) addresses[i] = reg<u32>(w, o.s[0])[i];
  const u32 first = uniform(cta, w, o, mask, addresses, "the address");
  const u32 count = reg<u32>(w, o.s[1])[__builtin_ctz(mask)], unit = first / TENSOR_UNIT;
  if (first >= TENSOR_COLUMNS || first % TENSOR_UNIT || t.owner[unit] != 1 + first || t.size[unit] != count)
    fail_at(cta, w, o, 0, format("tcgen05.dealloc of %u columns at 0x%x: not what was allocated", count, first));
  for (u32 column = first; column < first + count; column++)
    for (u32 lane = 0; lane < TENSOR_LANES; lane += TENSOR_CELL_LANES) {
      const u32 cell = tensor_cell(lane, column);
      if (cta.races.on) t.write(cta, w, o, cell, {tensor_store_agent(cta, w), 0});
      if (t.unfinished[cell])
        fail_at(cta, w, o, 0, format("tcgen05.dealloc while writes to column %u are unfinished", column));
    }
  std::fill_n(t.owner + unit, count / TENSOR_UNIT, 0);
}

void relinquish(Cta& cta, Warp&, const Op&, u32) { tensor_memory(cta).relinquished = true; }

}  // namespace

void decode_tensor_allocation(Decoder& d, Instruction& i) {
  const std::string& what = i.word(1);
  allow_words(d, i, {"cta_group::1", "sync", "aligned", "shared::cta", "b32"});
  if (!i.has("cta_group::1")) d.bad("cta_group");
  i.op.together = Together::All;
  if (what == "relinquish_alloc_permit") {
    d.expect(i, 0);
    i.op.fn = relinquish;
    return;
  }
  d.expect(i, 2);
  if (what == "alloc") {
    if (!i.has("shared::cta")) d.bad("generic address space");
    i.op.address[0] = d.address(i.operands[0]);
    i.op.s[0] = d.source(i.operands[1], 32);
    i.op.fn = alloc;
  } else {
    for (size_t k = 0; k < 2; k++) i.op.s[k] = d.source(i.operands[k], 32);
    i.op.fn = dealloc;
  }
}

}  // namespace emu
