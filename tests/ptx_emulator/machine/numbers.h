// The floating-point formats that C++ lacks: bf16, fp16, tf32 and those of 8 bits, held in integers and computed with
// in fp32. A NaN is stored as the canonical one, as by the GPU's conversions.
#pragma once
#include <cmath>

#include "basics.h"

namespace emu {

inline float from_bits(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u32 to_bits(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

constexpr u16 CANONICAL_NAN_16 = 0x7fff;
constexpr u32 CANONICAL_NAN_32 = 0x7fffffff;

struct BF16 {
  static float load(u16 v) { return from_bits(u32(v) << 16); }
  static u16 round(u32 bits) {  // of an fp32, to nearest even
    if ((bits & 0x7fffffff) > 0x7f800000) return CANONICAL_NAN_16;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static u16 store(float f) { return round(to_bits(f)); }
};

struct FP16 {
  static float load(u16 v) {
    _Float16 h;
    memcpy(&h, &v, 2);
    return float(h);
  }
  static u16 store(float f) {
    if (f != f) return CANONICAL_NAN_16;
    _Float16 h = _Float16(f);
    u16 v;
    memcpy(&v, &h, 2);
    return v;
  }
};

// OCP 8-bit Floating Point Specification: e4m3 has no infinity, and one NaN of each sign; it is fp16 without the lower
// bits, but for the bias of the exponent. e5m2 is the upper half of fp16.
struct E4M3 {
  static float load(u8 v) {
    const u16 sign = u16((v & 0x80) << 8), rest = v & 0x7f;
    return rest == 0x7f ? from_bits(CANONICAL_NAN_32) : 256 * FP16::load(u16(sign | rest << 7));
  }
};
struct E5M2 {
  static float load(u8 v) { return FP16::load(u16(v << 8)); }
};
// OCP Microscaling Formats: a power of two, from 2^-127 on; the last one is NaN
struct UE8M0 {
  static constexpr int BIAS = 127;
  static constexpr u8 TOP = 0xfe, NOT_A_NUMBER = 0xff;
  static float load(u8 v) { return from_bits(v == NOT_A_NUMBER ? CANONICAL_NAN_32 : v ? u32(v) << 23 : 1u << 22); }
};

struct TF32 {
  static float load(u32 v) { return from_bits(v & 0xffffe000); }  // the tensor cores ignore the 13 lower bits
};

inline float flush_denormal(float f) { return std::fabs(f) < 1.17549435e-38f ? std::copysign(0.0f, f) : f; }

}  // namespace emu
