// ld and st of global and shared memory and of parameters. Every store is seen at once: caches and the memory model
// between CTAs are not modelled, so that .volatile, .relaxed, .acquire and .release mean nothing here.
#include <algorithm>

#include "banks.h"
#include "families.h"
#include "lanes.h"

namespace emu {

namespace {

struct AccessOptions {
  Space space;
  u8 bytes;  // of an element
  bool sign_extends;
};

u64 extended(u64 v, u32 bytes) {
  return bytes == 1 ? u64(s64(s8(v))) : bytes == 2 ? u64(s64(s16(v))) : bytes == 4 ? u64(s64(s32(v))) : v;
}

template <class T>
void load_elements(Warp& w, u32 mask, const u8* const* from, u32 offset, u32 destination) {
  T* d = reg<T>(w, destination);
  for_lanes(mask, [&](int i) { memcpy(&d[i], from[i] + offset, sizeof(T)); });
}

void load(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<AccessOptions>();
  const Addresses at = addresses(w, o.address[0]);
  const u32 bytes = options.bytes, size = bytes * u32(o.list.size());
  const u8* from[LANES];
  for_lanes(mask, [&](int i) { from[i] = locate(cta, w, o, i, options.space, at[i], size, Access::Read); });
  u32 offset = 0;
  for (const Slot& d : o.list) {
    if (bytes == 4 && d.bits == 32) load_elements<u32>(w, mask, from, offset, d.offset);
    else if (bytes == 2 && d.bits == 16) load_elements<u16>(w, mask, from, offset, d.offset);
    else if (bytes == 8 && d.bits == 64) load_elements<u64>(w, mask, from, offset, d.offset);
    else
      for_lanes(mask, [&](int i) {
        u64 v = 0;
        memcpy(&v, from[i] + offset, bytes);
        write_unsigned(w, d.offset, d.bits, i, options.sign_extends ? extended(v, bytes) : v);
      });
    offset += bytes;
  }
  u64* c = cta.launch->counters;
  if (options.space == Space::Global) {
    c[C_GLOBAL_LOADS]++;
    c[C_GLOBAL_LOAD_SECTORS] += u64(count_sectors(at, mask, size));
  } else if (options.space == Space::Shared) {
    count_wavefronts(cta, o, at, mask, size, C_SHARED_LOAD_CONFLICTS);
    if (cta.races.on) for_lanes(mask, [&](int i) { shared_read(cta, w, o, u32(at[i]), size); });
  }
}

void store(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<AccessOptions>();
  const Addresses at = addresses(w, o.address[0]);
  const u32 bytes = options.bytes, size = bytes * u32(o.list.size());
  const bool shared = options.space == Space::Shared;
  Launch& launch = *cta.launch;
  for_lanes(mask, [&](int i) {
    u8 value[64];
    u32 offset = 0;
    for (const Slot& s : o.list) {
      memcpy(value + offset, w.registers + s.offset + u32(i) * s.bits / 8, bytes);
      offset += bytes;
    }
    // CTAs that store what is there already do not race.
    bool same = launch.config.global_races && !shared && at[i] % size == 0 && is_global(launch, at[i], size) &&
                memcmp(value, reinterpret_cast<u8*>(at[i]), size) == 0;
    u8* to = locate(cta, w, o, i, options.space, at[i], size, Access::Write, same ? Order::Atomic : Order::Unordered);
    if (shared && cta.races.on)
      shared_write(cta, w, o, u32(at[i]), size, memcmp(value, to, size) == 0 ? WriteKind::Same : WriteKind::Plain);
    memcpy(to, value, size);
  });
  if (shared) {
    count_wavefronts(cta, o, at, mask, size, C_SHARED_STORE_CONFLICTS);
  } else {
    launch.counters[C_GLOBAL_STORES]++;
    launch.counters[C_GLOBAL_STORE_SECTORS] += u64(count_sectors(at, mask, size));
  }
}

// PTX ISA, Operand Size Exceeding Instruction-Type Size: registers may be wider than the elements.
Slot slot(Decoder& d, const Operand& o, int element_bits, bool is_store) {
  const int bits = o.is(Operand::Kind::Register) ? o.reg.bits : std::max(16, element_bits);
  if (bits < element_bits) d.bad(is_store ? "store of a narrower register" : "load into a narrower register");
  return is_store ? d.source_slot(o, bits) : d.destination_slot(o, bits);
}

}  // namespace

void decode_load_store(Decoder& d, Instruction& i) {
  const bool is_store = i.name() == "st";
  d.expect(i, i.has("L2::cache_hint") ? 3 : 2);  // the last is a policy
  const Space space = space_of(i);
  if (space == Space::Generic) d.bad("generic address space");
  if (i.type == Type::None || i.type == Type::Pred || i.type == Type::B128) d.bad("type");
  i.op.set<AccessOptions>() = {space, u8(bits_of(i.type) / 8), is_signed(i.type)};
  const auto elements = i.operands[is_store ? 1 : 0].elements();
  const size_t wanted = i.has("v2") ? 2 : i.has("v4") ? 4 : i.has("v8") ? 8 : 1;
  if (elements.size() != wanted) d.bad("vector size");
  for (auto& e : elements) i.op.list.push_back(slot(d, e, bits_of(i.type), is_store));
  i.op.address[0] = d.address(i.operands[is_store ? 0 : 1]);
  i.op.fn = is_store ? store : load;
}

}  // namespace emu
