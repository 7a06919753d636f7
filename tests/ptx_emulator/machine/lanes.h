// Registers of 32 lanes: each is a vector in the register file of its warp, a predicate is one mask. They are read as
// the type that an instruction names: the sources are compiled with -fno-strict-aliasing (and -fwrapv).
#pragma once
#include "machine.h"

namespace emu {

constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

template <class T>
inline T* reg(Warp& w, u32 offset) {
  return reinterpret_cast<T*>(w.registers + offset);
}
inline bool on(u32 mask, int lane) { return mask >> lane & 1; }

template <class F>
inline void for_lanes(u32 mask, F f) {
  for (int i = 0; i < LANES; i++)
    if (on(mask, i)) f(i);
}

inline void set_predicate(Warp& w, u32 offset, u32 mask, u32 value) {
  u32* p = reg<u32>(w, offset);
  *p = (*p & ~mask) | (value & mask);
}
inline u32 predicate(Warp& w, u32 offset, bool negated = false) {
  u32 p = *reg<u32>(w, offset);
  return negated ? ~p : p;
}

// A register of 16, 32 or 64 bits as an integer
inline u64 read_unsigned(Warp& w, u32 offset, u32 bits, int lane) {
  return bits == 16 ? reg<u16>(w, offset)[lane] : bits == 32 ? reg<u32>(w, offset)[lane] : reg<u64>(w, offset)[lane];
}
inline void write_unsigned(Warp& w, u32 offset, u32 bits, int lane, u64 value) {
  if (bits == 16) reg<u16>(w, offset)[lane] = u16(value);
  else if (bits == 32) reg<u32>(w, offset)[lane] = u32(value);
  else reg<u64>(w, offset)[lane] = value;
}

// The addresses of an operand in all lanes
struct Addresses {
  u64 at[LANES];
  u64 operator[](int lane) const { return at[lane]; }
};
inline Addresses addresses(Warp& w, const Address& a) {
  Addresses out;
  if (a.wide) {
    const u64* base = reg<u64>(w, a.base);
    for (int i = 0; i < LANES; i++) out.at[i] = base[i] + u64(a.offset);
  } else {
    const u32* base = reg<u32>(w, a.base);
    for (int i = 0; i < LANES; i++) out.at[i] = u32(base[i] + u32(a.offset));
  }
  return out;
}

inline void nothing(Cta&, Warp&, const Op&, u32) {}

}  // namespace emu
