// wgmma.mma_async, fence, commit_group and wait_group. A is in registers or, as B always, in shared memory, where a
// descriptor says how it lies; both major-nesses and all swizzles.
#include "wgmma.h"

#include <algorithm>

#include "decoder.h"
#include "matrix_operands.h"
#include "messages.h"
#include "products.h"

namespace emu {

namespace {

struct WgmmaOptions {
  u16 columns;
  Element a, b;
  bool a_in_registers;
  bool scale_d_negated, negate_a, negate_b;
  bool mn_major_a, mn_major_b;  // "transposed"
  int depth() const { return 32 / int(bytes_of(a)); }
};

// PTX ISA, Asynchronous Warpgroup Level Matrix Shared Memory Layout: Matrix Descriptor Format
OperandLayout unpack(Cta& cta, Warp& w, const Op& o, u64 d) {
  static const Swizzle modes[] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
  if (d >> 49 & 7) fail_at(cta, w, o, 0, "wgmma descriptor: base offset");
  auto field = [&](int shift) { return u32(d >> shift & 0x3fff) << 4; };
  return {field(0), field(16), field(32), modes[d >> 62]};
}
Part part_a(Cta& cta, Warp& w, const Op& o, u64 descriptor) {
  const auto& options = o.get<WgmmaOptions>();
  const u32 first = u32(w.id % 4) * 16, depth = u32(options.depth());
  return {unpack(cta, w, o, descriptor), options.a, options.mn_major_a, first, 16, depth};
}
Part part_b(Cta& cta, Warp& w, const Op& o, u64 descriptor) {
  const auto& options = o.get<WgmmaOptions>();
  const u32 columns = options.columns, depth = u32(options.depth());
  return {unpack(cta, w, o, descriptor), options.b, options.mn_major_b, 0, columns, depth};
}

void perform(Cta& cta, Warp& w, const WgmmaPending& p) {
  const Op& o = cta.program->ops[size_t(p.op)];
  const auto& options = o.get<WgmmaOptions>();
  const int columns = options.columns;
  static thread_local float a[32][16], b[32][256], c[16][256];
  if (options.a_in_registers)
    for_fragment_a(w, &o.list[size_t(columns) / 2], 4, options.a, [&](int row, int k, float v) { a[k][row] = v; });
  else read_part(cta, w, o, part_a(cta, w, o, p.descriptor_a), &a[0][0], 16);
  read_part(cta, w, o, part_b(cta, w, o, p.descriptor_b), &b[0][0], 256);
  const float sign = options.negate_a != options.negate_b ? -1.0f : 1.0f;
  auto for_accumulators = [&](auto f) {
    for (int j = 0; j < columns / 8; j++)
      for (int r = 0; r < 4; r++) {
        float* d = reg<float>(w, o.list[size_t(4 * j + r)].offset);
        for (int i = 0; i < LANES; i++) f(d[i], c[row_of_d(i, r)][8 * j + column_of_d(i, r)]);
      }
  };
  for_accumulators([&](float& d, float& sum) { sum = p.scale_d ? d : 0.0f; });
  const SumBits bits = sum_bits(cta, options.a);
  for (u32 row = 0; row < 16; row++)
    add_products({&a[0][row], b[0], 16, 256, u32(options.depth()), u32(columns), options.a, options.b, sign}, bits,
                 c[row]);
  for_accumulators([&](float& d, float& sum) { d = sum; });
}

// PTX ISA, wgmma.mma_async: the warps of a group execute the same instructions with the same descriptors. Each runs by
// itself here, and the instructions that they issue are compared one by one.
struct GroupOrder : FamilyState {
  struct Issue {
    int op;
    u64 a, b;
    bool operator==(const Issue& other) const = default;
  };
  struct Group {
    std::deque<Issue> issued;  // instructions that not all of its warps have issued yet
    u64 first = 0;             // number that all have issued
    u64 count[4] = {};         // by warp
  };
  std::map<int, Group> groups;

  bool agrees(const Warp& w, const Issue& issue) {
    Group& g = groups[w.id / 4];
    const u64 k = g.count[w.id % 4]++ - g.first;
    if (k == g.issued.size()) g.issued.push_back(issue);
    if (!(g.issued[k] == issue)) return false;
    for (; *std::min_element(g.count, g.count + 4) > g.first; g.first++) g.issued.pop_front();
    return true;
  }
  void end(Cta& cta) override {
    for (auto& [number, g] : groups)
      if (!g.issued.empty())
        fail("%s: the warps of warp group %d have not issued the same number of wgmmas", cta.program->name.c_str(),
             number);
  }
};

void check_uniform(Cta& cta, Warp& w, const Op& o, u32 mask, const WgmmaPending& p, u32 scale_d) {
  const bool a_in_registers = o.get<WgmmaOptions>().a_in_registers;
  if ((scale_d & mask) != mask && (scale_d & mask) != 0) fail_at(cta, w, o, 0, "wgmma: scale-d differs between lanes");
  for_lanes(mask, [&](int i) {
    if (!a_in_registers && reg<u64>(w, o.s[0])[i] != p.descriptor_a)
      fail_at(cta, w, o, i, "wgmma: descriptor of A differs between lanes");
    if (reg<u64>(w, o.s[1])[i] != p.descriptor_b) fail_at(cta, w, o, i, "wgmma: descriptor of B differs between lanes");
  });
  if (!cta.state<GroupOrder>().agrees(w, {o.number, p.descriptor_a, p.descriptor_b}))
    fail_at(cta, w, o, 0, "wgmma: another warp of the group has issued another one, or other descriptors");
}

void check_fenced(Cta& cta, Warp& w, const Op& o) {
  for (const Slot& s : o.list)
    if (w.wgmma.written[s.offset / 64])
      return cta.launch->note(format("FENCE: wgmma uses a register that was written since the last wgmma.fence: %s, %s",
                                     where(cta, w, o).c_str(), cta.program->register_name(s.offset).c_str()));
}

void mma_async(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<WgmmaOptions>();
  if (mask != w.alive) fail_at(cta, w, o, 0, "wgmma with some lanes only");
  if (cta.warps.size() % 4) fail_at(cta, w, o, 0, "wgmma without a whole warp group");
  WgmmaPending p;
  p.op = o.number;
  p.descriptor_a = options.a_in_registers ? 0 : reg<u64>(w, o.s[0])[0];
  p.descriptor_b = reg<u64>(w, o.s[1])[0];
  const u32 scale_d = predicate(w, o.s[2], options.scale_d_negated);
  p.scale_d = scale_d & 1;
  check_uniform(cta, w, o, mask, p, scale_d);
  check_fenced(cta, w, o);
  if (cta.races.on) {
    const Agent by{wgmma_agent(cta, w), w.wgmma.sequence + 1};
    if (!options.a_in_registers) record_part(cta, w, o, part_a(cta, w, o, p.descriptor_a), by);
    record_part(cta, w, o, part_b(cta, w, o, p.descriptor_b), by);
  }
  Launch& launch = *cta.launch;
  launch.counters[C_WGMMA]++;
  launch.counters[C_WGMMA_MACS] += u64(16) * options.columns * u64(options.depth());
  const Mode mode = launch.config.mode;
  const bool none_in_flight = w.wgmma.open.empty() && w.wgmma.groups.empty();  // they are done in order
  if (mode == Mode::Early || (mode == Mode::Random && none_in_flight && (launch.random() & 1)))
    return perform(cta, w, p);
  for (const Slot& s : o.list) w.in_flight[s.offset / 64]++;
  w.flying++;
  w.wgmma.open.push_back(p);
}

void commit_group(Cta&, Warp& w, const Op&, u32) {
  w.wgmma.sequence++;
  w.wgmma.groups.push_back(std::move(w.wgmma.open));
  w.wgmma.open.clear();
}

void wait_group(Cta& cta, Warp& w, const Op& o, u32) {
  WgmmaState& state = w.wgmma;
  while (state.groups.size() > size_t(o.imm)) {
    for (auto& p : state.groups.front()) {
      perform(cta, w, p);
      for (const Slot& s : cta.program->ops[size_t(p.op)].list) w.in_flight[s.offset / 64]--;
      w.flying--;
    }
    state.groups.pop_front();
  }
  const u32 pending = u32(o.imm);
  acquire(cta, w, wgmma_agent(cta, w), state.sequence > pending ? state.sequence - pending : 0);
}

// PTX ISA, wgmma.fence: orders writes of registers before the wgmmas that use them.
void fence(Cta&, Warp& w, const Op&, u32) { std::fill(w.wgmma.written.begin(), w.wgmma.written.end(), 0); }

void decode_mma_async(Decoder& d, Instruction& i) {
  WgmmaOptions& options = i.op.set<WgmmaOptions>();
  int columns = 0, depth = 0;
  for (auto& word : i.words)
    if (starts_with(word, "m64n")) sscanf(word.c_str(), "m64n%dk%d", &columns, &depth);
  if (columns < 8 || columns > 256 || columns % 8) d.bad("wgmma shape");
  const auto types = i.types();
  if (types.size() != 3 || types[0] != Type::F32) d.bad("wgmma types");
  options.columns = u16(columns), options.a = element_of(types[1]), options.b = element_of(types[2]);
  if (!are_factors(options.a, options.b) || depth != options.depth()) d.bad("wgmma type");
  if (i.operands.size() < 6) d.bad("wgmma operands");
  const Operand &to = i.operands[0], &a = i.operands[1], &scale_d = i.operands[3];
  if (int(to.parts.size()) != columns / 2) d.bad("wgmma accumulators");
  for (auto& part : to.parts) i.op.list.push_back(d.destination_slot(part, 32));
  options.a_in_registers = a.is(Operand::Kind::Vector);
  if (options.a_in_registers) {
    if (a.parts.size() != 4) d.bad("wgmma A registers");
    for (auto& part : a.parts) i.op.list.push_back(d.source_slot(part, 32));
  } else {
    i.op.s[0] = d.source(a, 64);
  }
  i.op.s[1] = d.source(i.operands[2], 64);
  i.op.s[2] = d.source(scale_d, 1), options.scale_d_negated = scale_d.negated;
  options.negate_a = i.operands[4].value == -1, options.negate_b = i.operands[5].value == -1;
  size_t at = 6;
  if (bytes_of(options.a) == 2) {  // others may not be MN-major
    const size_t flags = options.a_in_registers ? 1 : 2;
    if (i.operands.size() < at + flags) d.bad("wgmma operands");
    if (!options.a_in_registers) options.mn_major_a = i.operands[at++].value;
    options.mn_major_b = i.operands[at++].value;
  }
  if (at != i.operands.size()) d.bad("wgmma operands");
  i.op.meets_in_flight = true;
  i.op.fn = mma_async;
}

}  // namespace

void decode_wgmma(Decoder& d, Instruction& i) {
  const std::string& what = i.word(1);
  i.op.together = Together::All;
  if (what == "mma_async") return decode_mma_async(d, i);
  if (what == "fence") i.op.fn = fence;
  if (what == "commit_group") i.op.fn = commit_group;
  if (what == "wait_group") {
    d.expect(i, 1);
    i.op.imm = i.operands[0].value;
    i.op.meets_in_flight = true;
    i.op.fn = wait_group;
  }
}

void end_wgmma(Cta& cta, Warp& w) {
  auto note = [&](const char* what) { cta.launch->note(format("warp ends with %s that nothing waited for", what)); };
  if (!w.wgmma.open.empty()) note("wgmma");
  for (auto& group : w.wgmma.groups)
    if (!group.empty()) note("wgmma groups");
}

void keep_wgmma_operands(Program& program) {
  std::vector<bool> operand(program.register_bytes / 64 + 1, false);
  for (auto& op : program.ops)
    if (op.fn == mma_async)
      for (const Slot& s : op.list) operand[s.offset / 64] = true;
  for (auto& op : program.ops)  // registers of 32 bits start at multiples of 64 bytes
    std::erase_if(op.writes, [&](u32 r) { return r % 64 != 0 || !operand[r / 64]; });
}

}  // namespace emu
