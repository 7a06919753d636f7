// TMA stores and reductions (add only). PTX ISA, cp.async.bulk.wait_group: with .read shared memory has been read, else
// global memory has been written as well; stores that nothing waits for are written when the launch ends.
#include "bulk_stores.h"

#include <algorithm>

#include "families.h"
#include "lanes.h"
#include "messages.h"
#include "numbers.h"

namespace emu {

namespace {

struct StoreOptions {
  u8 rank;
  Reduction reduction;
};
struct WaitOptions {
  bool read_only;  // .read
};

void read_shared(Cta& cta, Warp& w, BulkStore& s) {
  if (s.read) return;
  const Op& o = cta.program->ops[size_t(s.op)];
  s.read = true;
  const u32 bytes = u32(s.map.box_bytes());
  s.data.resize(bytes);
  for (u32 k = 0; k < bytes; k += 16) {
    u32 at = swizzled(s.shared + k, s.map.swizzle);
    check_shared(cta, w, o, 0, at, 16);
    memcpy(&s.data[k], cta.shared_at(at), std::min(16u, bytes - k));
  }
  // The rows must be in bounds now, whenever they are written. PTX ISA, cp.reduce.async.bulk.tensor: a reduction is
  // atomic, element by element.
  const Order order = s.reduction == Reduction::None ? Order::Unordered : Order::Atomic;
  for_rows(s.map, s.coordinates, [&](const BoxRow& row) {
    if (!row.empty()) check_global(cta, w, o, 0, row.address + row.inside, row.end - row.inside, Access::Write, order);
  });
}

template <class T, class F>
void combine(u8* to, const u8* from, F f) {
  T x, y;
  memcpy(&x, to, sizeof(T)), memcpy(&y, from, sizeof(T));
  x = f(x, y);
  memcpy(to, &x, sizeof(T));
}
void add_element(ElementType type, u8* to, const u8* from) {
  switch (type) {
    case ElementType::F32:
    case ElementType::F32_FTZ: return combine<float>(to, from, [](float x, float y) { return x + y; });
    case ElementType::BF16:
      return combine<u16>(to, from, [](u16 x, u16 y) { return BF16::store(BF16::load(x) + BF16::load(y)); });
    case ElementType::F16:
      return combine<u16>(to, from, [](u16 x, u16 y) { return FP16::store(FP16::load(x) + FP16::load(y)); });
    case ElementType::U32:
    case ElementType::S32: return combine<u32>(to, from, [](u32 x, u32 y) { return x + y; });
    default: fail("TMA reduction of type %d", int(type));
  }
}

void issue(Cta& cta, Warp& w, const Op& o, int lane, BulkStore s) {
  const u32 bytes = u32(s.map.box_bytes());
  check_shared(cta, w, o, lane, s.shared, bytes);
  if (s.shared % 128) fail_at(cta, w, o, lane, "TMA: shared address is not a multiple of 128");
  if (cta.races.on) {
    race_read(cta, w, o, s.shared, bytes, {bulk_agent(cta, w), w.bulk.sequence + 1});
    async_access(cta, w, o, s.shared, bytes, Access::Read);
  }
  Launch& launch = *cta.launch;
  launch.counters[s.reduction == Reduction::None ? C_TMA_STORES : C_TMA_REDUCES]++;
  launch.counters[C_TMA_STORE_BYTES] += bytes;
  const Mode mode = launch.config.mode;
  if (mode == Mode::Early || (mode == Mode::Random && (launch.random() & 1))) read_shared(cta, w, s);
  if (mode == Mode::Early) write_global(launch, s);
  else w.bulk.open.push_back(std::move(s));
}

void bulk_store(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<StoreOptions>();
  const Addresses shared = addresses(w, o.address[0]), map = addresses(w, o.address[1]);
  for_lanes(mask, [&](int i) {
    BulkStore s;
    s.map = read_map(cta, w, o, i, map[i], options.rank);
    for (u32 k = 0; k < options.rank; k++) s.coordinates[k] = reg<s32>(w, o.list[k].offset)[i];
    s.shared = u32(shared[i]), s.reduction = options.reduction, s.op = o.number;
    s.cta = cta.linear, s.warp = w.id, s.lane = i;
    issue(cta, w, o, i, std::move(s));
  });
}

void commit_group(Cta&, Warp& w, const Op&, u32 mask) {
  BulkStoreState& state = w.bulk;
  state.sequence++;
  for_lanes(mask, [&](int i) { state.groups[i].emplace_back(); });
  std::vector<BulkStore> rest;
  for (auto& s : state.open) (on(mask, s.lane) ? state.groups[s.lane].back() : rest).push_back(std::move(s));
  state.open = std::move(rest);
}

void write_awaited(Launch& launch, const Cta& cta, const Warp& w, u32 mask) {
  std::vector<BulkStore> rest;
  for (auto& s : launch.late_writes) {
    bool mine = s.cta == cta.linear && s.warp == w.id && on(mask, s.lane);
    if (mine) write_global(launch, s);
    else rest.push_back(std::move(s));
  }
  launch.late_writes = std::move(rest);
}

void wait_group(Cta& cta, Warp& w, const Op& o, u32 mask) {
  Launch& launch = *cta.launch;
  for_lanes(mask, [&](int i) {
    auto& groups = w.bulk.groups[i];
    while (groups.size() > size_t(o.imm)) {
      for (auto& s : groups.front()) {
        read_shared(cta, w, s);
        launch.late_writes.push_back(std::move(s));
      }
      groups.erase(groups.begin());
    }
  });
  if (!o.get<WaitOptions>().read_only) write_awaited(launch, cta, w, mask);
  const u32 pending = u32(o.imm);
  acquire(cta, w, bulk_agent(cta, w), w.bulk.sequence > pending ? w.bulk.sequence - pending : 0);
}

}  // namespace

void decode_bulk_store(Decoder& d, Instruction& i) {
  const bool reduces = i.word(1) == "reduce";
  const size_t tensor = reduces ? 4 : 3;  // where the name says so, and the rank after it
  if (i.word(tensor) != "tensor") return;
  if (i.operands.size() < 2) d.bad("TMA operands");
  if (reduces && !i.has("add")) d.bad("TMA reduction other than add");
  i.op.address[0] = d.address(i.operands[1]);
  const u32 rank = decode_tensor_operand(d, i, i.operands[0], i.word(tensor + 1));
  i.op.set<StoreOptions>() = {u8(rank), reduces ? Reduction::Add : Reduction::None};
  i.op.fn = bulk_store;
}

void decode_bulk_group(Decoder& d, Instruction& i) {
  if (i.word(3) == "commit_group") {
    i.op.fn = commit_group;
    return;
  }
  d.expect(i, 1);
  i.op.imm = i.operands[0].value;
  i.op.set<WaitOptions>().read_only = i.has("read");
  i.op.fn = wait_group;
}

void write_global(Launch& launch, const BulkStore& s) {
  for_rows(s.map, s.coordinates, [&](const BoxRow& row) {
    const u32 count = row.empty() ? 0 : row.end - row.inside;
    launch.counters[C_TMA_OOB_BYTES] += row.bytes - count;
    if (!count) return;
    launch.before_write(row.address + row.inside, count);
    u8* to = reinterpret_cast<u8*>(row.address + row.inside);
    const u8* from = s.data.data() + row.offset + row.inside;
    if (s.reduction == Reduction::None) memcpy(to, from, count);
    else
      for (u32 k = 0; k < count; k += s.map.item) add_element(s.map.type, to + k, from + k);
  });
}

void end_bulk_stores(Cta& cta, Warp& w) {
  Launch& launch = *cta.launch;
  auto late = [&](BulkStore& s, const char* what) {
    if (what) launch.note(format("warp ends with %s that nothing waited for", what));
    read_shared(cta, w, s);
    launch.late_writes.push_back(std::move(s));
  };
  for (auto& s : w.bulk.open) late(s, "bulk stores not committed");
  for (auto& lane : w.bulk.groups)
    for (auto& group : lane)
      for (auto& s : group) late(s, s.read ? nullptr : "bulk stores whose shared memory may still be read");
}

}  // namespace emu
