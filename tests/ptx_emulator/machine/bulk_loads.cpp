// TMA loads: boxes of tensors to shared memory, through the async proxy (PTX ISA, cp.async.bulk.tensor). They complete
// bytes on an mbarrier; until then the destination holds NaNs. No im2col, no multicast.
#include "families.h"
#include "lanes.h"
#include "messages.h"

namespace emu {

namespace {

struct LoadOptions {
  u8 rank;
  u8 boxes;  // of four rows anywhere (tile::gather4), each is a box of its own
};

struct TmaLoad : AsyncOperation {
  TensorMap map;
  u32 boxes;
  s32 coordinates[5];  // of several boxes: the column that they share, then each one's row
  u32 shared, mbarrier;
  int op, warp;

  void complete(Cta& cta) override {
    Warp& w = *cta.warps[size_t(warp)];
    const Op& o = cta.program->ops[size_t(op)];
    for (u32 box = 0; box < boxes; box++) {
      const u32 to = shared + box * u32(map.box_bytes());
      const s32 place[] = {coordinates[0], coordinates[1 + box]};
      for_rows(map, boxes > 1 ? place : coordinates, [&](const BoxRow& row) { load_row(cta, w, o, row, to); });
    }
    Mbarrier& b = signalled_mbarrier(cta, w, o, mbarrier, "TMA load");
    complete_transactions(cta, b, s64(bytes()));
  }
  u32 bytes() const { return boxes * u32(map.box_bytes()); }
  bool signals(u32 address) const override { return address == mbarrier; }
  const char* name() const override { return "a TMA load"; }

 private:
  void load_row(Cta& cta, Warp& w, const Op& o, const BoxRow& row, u32 box) const {
    u8 bytes[4096];
    memset(bytes, map.nan_fill ? 0xff : 0, row.bytes);
    u32 inside = 0;
    if (!row.empty()) {
      inside = row.end - row.inside;
      check_global(cta, w, o, 0, row.address + row.inside, inside, Access::Read);
      memcpy(bytes + row.inside, reinterpret_cast<const u8*>(row.address + row.inside), inside);
      if (map.type == ElementType::TF32 || map.type == ElementType::TF32_FTZ)
        fail_at(cta, w, o, 0, "TMA with rounding to tf32");
    }
    cta.launch->counters[C_TMA_OOB_BYTES] += row.bytes - inside;
    for (u32 k = 0; k < row.bytes; k += 16) {
      u32 at = swizzled(box + row.offset + k, map.swizzle);
      check_shared(cta, w, o, 0, at, 16);
      memcpy(cta.shared_at(at), bytes + k, std::min(16u, row.bytes - k));
    }
  }
};

void issue(Cta& cta, Warp& w, const Op& o, int lane, std::unique_ptr<TmaLoad> load) {
  const u32 bytes = load->bytes();
  check_shared(cta, w, o, lane, load->shared, bytes);
  if (load->shared % 128) fail_at(cta, w, o, lane, "TMA: shared address is not a multiple of 128");
  static const u32 patterns[] = {1, 256, 512, 1024};
  if (load->boxes == 1 && load->shared % patterns[int(load->map.swizzle)])
    cta.launch->note(format("TMA: shared address does not start a swizzle pattern: %s", where(cta, w, o).c_str()));
  Mbarrier& b = use_mbarrier(cta, w, o, lane, load->mbarrier);
  check_init_visible(cta, w, o, b);
  if (cta.races.on) {
    race_write(cta, w, o, load->shared, bytes, {mbarrier_agent(cta, b.number), u32(b.phase) + 1});
    async_access(cta, w, o, load->shared, bytes, Access::Write);
  }
  cta.launch->counters[C_TMA_LOADS]++;
  cta.launch->counters[C_TMA_LOAD_BYTES] += bytes;
  if (cta.launch->config.mode == Mode::Early) return load->complete(cta);
  memset(cta.shared_at(load->shared), 0xff, bytes);
  cta.in_flight.add(std::move(load));
}

void bulk_load(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const u32 rank = o.get<LoadOptions>().rank, boxes = o.get<LoadOptions>().boxes;
  const Addresses shared = addresses(w, o.address[0]), map = addresses(w, o.address[1]);
  const Addresses mbarrier = addresses(w, o.address[2]);
  for_lanes(mask, [&](int i) {
    auto load = std::make_unique<TmaLoad>();
    load->map = read_map(cta, w, o, i, map[i], rank), load->boxes = boxes;
    if (boxes > 1 && load->map.box[1] != 1) fail_at(cta, w, o, i, "TMA gather: the map's box has more than one row");
    for (u32 k = 0; k < o.list.size(); k++) load->coordinates[k] = reg<s32>(w, o.list[k].offset)[i];
    load->shared = u32(shared[i]), load->mbarrier = u32(mbarrier[i]);
    load->op = o.number, load->warp = w.id;
    issue(cta, w, o, i, std::move(load));
  });
}

}  // namespace

u32 decode_tensor_operand(Decoder& d, Instruction& i, const Operand& tensor, const std::string& rank_word, u32 boxes) {
  const u32 rank = u32(atoi(rank_word.c_str()));
  if (i.has("im2col") || i.has("tile::scatter4") || (i.has("tile::gather4") && boxes == 1)) d.bad("TMA mode");
  if (boxes > 1 && rank != 2) d.bad("TMA rank");
  i.op.address[1] = d.address(tensor);
  if (i.op.address[1].offset) d.bad("TMA offset");
  if (tensor.parts.size() != 2 || tensor.parts[1].parts.size() != rank + boxes - 1) d.bad("TMA coordinates");
  for (auto& coordinate : tensor.parts[1].parts) i.op.list.push_back(d.source_slot(coordinate, 32));
  return rank;
}

void decode_bulk_load(Decoder& d, Instruction& i) {
  if (i.operands.size() < 3) d.bad("TMA operands");
  i.op.address[0] = d.address(i.operands[0]);
  i.op.address[2] = d.address(i.operands[2]);
  const u32 boxes = i.has("tile::gather4") ? 4 : 1;
  const u32 rank = decode_tensor_operand(d, i, i.operands[1], i.word(4), boxes);
  i.op.set<LoadOptions>() = {u8(rank), u8(boxes)};
  i.op.fn = bulk_load;
}

}  // namespace emu
