// Elements of the matrices that tensor cores multiply, and how the registers of a warp hold A and D.
#pragma once
#include "decoder.h"
#include "lanes.h"
#include "numbers.h"

namespace emu {

enum class Element : u8 { None, BF16, FP16, TF32 };
inline Element element_of(Type t) {
  return t == Type::BF16   ? Element::BF16
         : t == Type::F16  ? Element::FP16
         : t == Type::TF32 ? Element::TF32
                           : Element::None;
}
inline u32 bytes_of(Element e) { return e == Element::TF32 ? 4 : 2; }
inline float half(Element e, u16 v) { return e == Element::BF16 ? BF16::load(v) : FP16::load(v); }
inline float element(Element e, const u8* bytes) {
  u32 raw = 0;
  memcpy(&raw, bytes, bytes_of(e));
  return e == Element::TF32 ? TF32::load(raw) : half(e, u16(raw));
}

// PTX ISA, Matrix Fragments for mma.m16n8k16 with floating point type: calls f(row, k, value) for the elements
// of 16 rows of A in `count` registers. It is the same for wgmma (Register Fragments and Shared Memory Matrix Layouts).
template <class F>
void for_fragment_a(Warp& w, const Slot* registers, int count, Element e, F f) {
  for (int r = 0; r < count; r++) {
    const u32* v = reg<u32>(w, registers[r].offset);
    for (int i = 0; i < LANES; i++) {
      int row = i / 4 + (r & 1) * 8, t = i % 4;
      if (e == Element::TF32) {
        f(row, t + r / 2 * 4, TF32::load(v[i]));
      } else {
        int k = 2 * t + r / 2 * 8;
        f(row, k, half(e, u16(v[i])));
        f(row, k + 1, half(e, u16(v[i] >> 16)));
      }
    }
  }
}

// Where register r of lane i lies in 16 rows of 8 columns of D, of which each lane holds 4 elements
inline int row_of_d(int lane, int r) { return lane / 4 + r / 2 * 8; }
inline int column_of_d(int lane, int r) { return 2 * (lane % 4) + (r & 1); }

}  // namespace emu
