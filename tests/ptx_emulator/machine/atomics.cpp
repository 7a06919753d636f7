// atom and red of global and shared memory: lanes one after the other, in the order of their numbers. Scopes and
// orderings mean nothing here.
#include <algorithm>

#include "families.h"
#include "lanes.h"
#include "messages.h"
#include "numbers.h"

namespace emu {

namespace {

// The new value, from the old one and the operands, of which only cas has two
using Combine = u64 (*)(u64 old, u64 operand, u64 second);

struct AtomicOptions {
  Combine combine;
  Space space;
  u8 bytes, count;  // of an element; elements
  bool compares, has_result;
};

template <class T>
T increment(T old, T most) {
  return old >= most ? T(0) : T(old + 1);
}
template <class T>
T decrement(T old, T most) {
  return old == 0 || old > most ? most : T(old - 1);
}

template <class T>
Combine integer(const std::string& name) {
  if (name == "add") return [](u64 a, u64 b, u64) { return u64(T(a + b)); };
  if (name == "exch") return [](u64, u64 b, u64) { return b; };
  if (name == "cas") return [](u64 a, u64 b, u64 c) { return T(a) == T(b) ? c : a; };
  if (name == "min") return [](u64 a, u64 b, u64) { return u64(std::min(T(a), T(b))); };
  if (name == "max") return [](u64 a, u64 b, u64) { return u64(std::max(T(a), T(b))); };
  if (name == "and") return [](u64 a, u64 b, u64) { return a & b; };
  if (name == "or") return [](u64 a, u64 b, u64) { return a | b; };
  if (name == "xor") return [](u64 a, u64 b, u64) { return a ^ b; };
  if (name == "inc") return [](u64 a, u64 b, u64) { return u64(increment(T(a), T(b))); };
  if (name == "dec") return [](u64 a, u64 b, u64) { return u64(decrement(T(a), T(b))); };
  return nullptr;
}

u64 add_f32(u64 a, u64 b, u64) { return to_bits(from_bits(u32(a)) + from_bits(u32(b))); }
u64 add_f64(u64 a, u64 b, u64) {
  double x, y;
  memcpy(&x, &a, 8), memcpy(&y, &b, 8);
  x += y;
  memcpy(&a, &x, 8);
  return a;
}
template <class H>
u64 add_half(u64 a, u64 b, u64) {
  return H::store(H::load(u16(a)) + H::load(u16(b)));
}
template <class H>
u64 add_pair(u64 a, u64 b, u64) {
  return add_half<H>(a, b, 0) | add_half<H>(a >> 16, b >> 16, 0) << 16;
}

Combine combination(const std::string& name, Type t) {
  if (is_float(t)) {
    if (name != "add") return nullptr;
    switch (t) {
      case Type::F32: return add_f32;
      case Type::F64: return add_f64;
      case Type::F16: return add_half<FP16>;
      case Type::BF16: return add_half<BF16>;
      case Type::F16x2: return add_pair<FP16>;
      default: return add_pair<BF16>;
    }
  }
  switch (t) {
    case Type::B16:
    case Type::U16: return integer<u16>(name);
    case Type::B32:
    case Type::U32: return integer<u32>(name);
    case Type::S32: return integer<s32>(name);
    case Type::B64:
    case Type::U64: return integer<u64>(name);
    case Type::S64: return integer<s64>(name);
    default: return nullptr;
  }
}

// The list holds operands, then results if there are any, then the second operand of cas.
void atomic(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<AtomicOptions>();
  const Addresses at = addresses(w, o.address[0]);
  const u32 bytes = options.bytes, count = options.count, size = bytes * count;
  auto lane_of = [&](u32 k, int lane) { return w.registers + o.list[k].offset + u32(lane) * bytes; };
  for_lanes(mask, [&](int i) {
    u8* p = locate(cta, w, o, i, options.space, at[i], size, Access::Write, Order::Atomic);
    if (options.space == Space::Shared) shared_write(cta, w, o, u32(at[i]), size, WriteKind::Atomic);
    for (u32 k = 0; k < count; k++) {
      u64 old = 0, operand = 0, second = 0;
      memcpy(&old, p + bytes * k, bytes);
      memcpy(&operand, lane_of(k, i), bytes);
      if (options.compares) memcpy(&second, lane_of(u32(o.list.size()) - 1, i), bytes);
      u64 result = options.combine(old, operand, second);
      memcpy(p + bytes * k, &result, bytes);
      if (options.has_result) memcpy(lane_of(count + k, i), &old, bytes);
    }
  });
  cta.launch->counters[C_ATOMICS]++;
}

}  // namespace

void decode_atomic(Decoder& d, Instruction& i) {
  static const char* names[] = {"add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec"};
  std::string name;
  for (auto* n : names)
    if (i.has(n)) name = n;
  if (name.empty()) d.bad("atomic operation");
  const Space space = space_of(i);
  if (space == Space::Generic) d.bad("generic address space");
  const bool red = i.name() == "red", compares = name == "cas";
  const size_t at = red ? 0 : 1;                                   // of the address
  d.expect(i, at + (compares ? 3 : 2) + i.has("L2::cache_hint"));  // the last is a policy
  const int bits = bits_of(i.type);
  const auto values = i.operands[at + 1].elements();
  const size_t wanted = i.has("v2") ? 2 : i.has("v4") ? 4 : i.has("v8") ? 8 : 1;
  if (values.size() != wanted) d.bad("vector size");
  Combine combine = combination(name, i.type);
  if (!combine) d.bad("atomic type");
  i.op.set<AtomicOptions>() = {combine, space, u8(bits / 8), u8(wanted), compares, !red};
  i.op.address[0] = d.address(i.operands[at]);
  for (auto& e : values) i.op.list.push_back(d.source_slot(e, bits));
  if (!red)
    for (auto& e : i.operands[0].elements()) i.op.list.push_back(d.destination_slot(e, bits));
  if (compares) i.op.list.push_back(d.source_slot(i.operands[at + 2], bits));
  i.op.fn = atomic;
}

}  // namespace emu
