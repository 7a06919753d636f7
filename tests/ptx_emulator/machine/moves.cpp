// mov, also of parts of a register, cvta and createpolicy. Generic addresses are those of global memory; parameters
// have theirs in the memory of the host, as tensor maps among them are named by generic addresses.
#include "arithmetic.h"
#include "families.h"

namespace emu {

namespace {

template <class T>
void move(Cta&, Warp& w, const Op& o, u32 mask) {
  T* d = reg<T>(w, o.d[0]);
  const T* a = reg<T>(w, o.s[0]);
  if (mask == ALL_LANES) memmove(d, a, LANES * sizeof(T));
  else for_lanes(mask, [&](int i) { d[i] = a[i]; });
}

struct PartsOptions {
  u8 whole_bits, part_bits;
};
void pack(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& bits = o.get<PartsOptions>();
  for_lanes(mask, [&](int i) {
    u64 whole = 0;
    for (size_t k = 0; k < o.list.size(); k++)
      whole |= read_unsigned(w, o.list[k].offset, bits.part_bits, i) << (k * bits.part_bits);
    write_unsigned(w, o.d[0], bits.whole_bits, i, whole);
  });
}
void unpack(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& bits = o.get<PartsOptions>();
  for_lanes(mask, [&](int i) {
    u64 whole = read_unsigned(w, o.s[0], bits.whole_bits, i);
    for (size_t k = 0; k < o.list.size(); k++)
      write_unsigned(w, o.list[k].offset, bits.part_bits, i, whole >> (k * bits.part_bits));
  });
}
void decode_parts(Decoder& d, Instruction& i) {
  d.expect(i, 2);
  const bool unpacks = i.operands[0].is(Operand::Kind::Vector);
  const auto& parts = i.operands[unpacks ? 0 : 1].parts;
  const int whole = bits_of(i.type), part = whole / int(parts.size());
  if (part != 16 && part != 32) d.bad("mov of parts");
  i.op.set<PartsOptions>() = {u8(whole), u8(part)};
  for (auto& o : parts) i.op.list.push_back(unpacks ? d.destination_slot(o, part) : d.source_slot(o, part));
  if (unpacks) i.op.s[0] = d.source(i.operands[1], whole), i.op.fn = unpack;
  else i.op.d[0] = d.destination(i.operands[0], whole), i.op.fn = pack;
}

void param_to_generic(Cta& cta, Warp& w, const Op& o, u32 mask) {
  for_lanes(mask, [&](int i) { reg<u64>(w, o.d[0])[i] = reg<u64>(w, o.s[0])[i] + u64(cta.launch->params); });
}

}  // namespace

void decode_move(Decoder& d, Instruction& i) {
  if (i.operands.empty()) return;
  if (i.name() == "createpolicy") {  // caches are not modelled
    i.op.d[0] = d.destination(i.operands[0], 64), i.op.s[0] = d.constant(0, 64), i.op.fn = move<u64>;
    return;
  }
  if (i.name() == "cvta") {
    if (i.has("shared") || i.has("local")) d.bad("cvta");
    return d.unary(i, 64, i.has("param") ? param_to_generic : move<u64>);
  }
  if (i.type == Type::Pred) return decode_predicates(d, i);
  d.expect(i, 2);
  if (i.operands[0].is(Operand::Kind::Vector) || i.operands[1].is(Operand::Kind::Vector)) return decode_parts(d, i);
  const int bits = bits_of(i.type);
  if (bits == 16) d.unary(i, bits, move<u16>);
  if (bits == 32) d.unary(i, bits, move<u32>);
  if (bits == 64) d.unary(i, bits, move<u64>);
}

}  // namespace emu
