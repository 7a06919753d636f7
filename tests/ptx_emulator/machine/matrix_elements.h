// Elements of the matrices that tensor cores multiply, and how the registers of a warp hold A and D.
#pragma once
#include "decoder.h"
#include "lanes.h"
#include "numbers.h"

namespace emu {

enum class Element : u8 { None, BF16, FP16, TF32, E4M3, E5M2 };
inline Element element_of(Type t) {
  switch (t) {
    case Type::BF16: return Element::BF16;
    case Type::F16: return Element::FP16;
    case Type::TF32: return Element::TF32;
    case Type::E4M3: return Element::E4M3;
    case Type::E5M2: return Element::E5M2;
    default: return Element::None;
  }
}
inline bool is_8_bit(Element e) { return e == Element::E4M3 || e == Element::E5M2; }
inline u32 bytes_of(Element e) { return e == Element::TF32 ? 4 : is_8_bit(e) ? 1 : 2; }
// The types of A and B of a product: 8-bit ones may differ.
inline bool are_factors(Element a, Element b) { return a != Element::None && (a == b || (is_8_bit(a) && is_8_bit(b))); }

inline float element(Element e, u32 bits) {  // of the lower bits
  switch (e) {
    case Element::BF16: return BF16::load(u16(bits));
    case Element::FP16: return FP16::load(u16(bits));
    case Element::E4M3: return E4M3::load(u8(bits));
    case Element::E5M2: return E5M2::load(u8(bits));
    default: return TF32::load(bits);
  }
}
inline float element(Element e, const u8* bytes) {
  u32 bits = 0;
  memcpy(&bits, bytes, bytes_of(e));
  return element(e, bits);
}
// Calls f(n, value) for the elements of a register, from its lower bits on.
template <class F>
void for_elements(Element e, u32 bits, F f) {
  const int size = int(8 * bytes_of(e));
  for (int n = 0; n < 32 / size; n++) f(n, element(e, bits >> n * size));
}

// PTX ISA, Matrix Fragments for mma (.m16n8k16 and .m16n8k32): calls f(row, k, value) for the elements of 16 rows of A
// in `count` registers. It is the same for wgmma (Register Fragments and Shared Memory Matrix Layouts).
template <class F>
void for_fragment_a(Warp& w, const Slot* registers, int count, Element e, F f) {
  const int each = 4 / int(bytes_of(e));
  for (int r = 0; r < count; r++) {
    const u32* v = reg<u32>(w, registers[r].offset);
    for (int i = 0; i < LANES; i++) {
      const int row = i / 4 + (r & 1) * 8, k = each * (i % 4 + r / 2 * 4);
      for_elements(e, v[i], [&](int n, float value) { f(row, k + n, value); });
    }
  }
}

// Where register r of lane i lies in 16 rows of 8 columns of D, of which each lane holds 4 elements
inline int row_of_d(int lane, int r) { return lane / 4 + r / 2 * 8; }
inline int column_of_d(int lane, int r) { return 2 * (lane % 4) + (r & 1); }

}  // namespace emu
