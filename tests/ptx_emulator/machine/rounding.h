// Rounding of exact values to floating-point formats: once, in any direction.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "basics.h"

namespace emu {

enum class Rounding : u8 { NearestEven, Zero, Down, Up, NearestAway };

// The binary formats of IEEE 754 and those like them: bits of the fraction and of the exponent. Some lack an infinity
// and have numbers with the highest exponent.
struct Format {
  int fraction, exponent;
  bool has_infinity = true;
  u64 sign() const { return 1ull << (fraction + exponent); }
  u64 nan() const { return sign() - 1; }  // the canonical NaN
  u64 infinity() const { return has_infinity ? ((1ull << exponent) - 1) << fraction : nan(); }
  u64 largest() const { return infinity() - 1; }
};
constexpr Format FORMAT_F16{10, 5}, FORMAT_BF16{7, 8}, FORMAT_TF32{10, 8}, FORMAT_F32{23, 8}, FORMAT_F64{52, 11};
constexpr Format FORMAT_E4M3{3, 4, false}, FORMAT_E5M2{2, 5};

// (negative ? -1 : 1) * magnitude * 2^exponent
struct Exact {
  bool negative;
  u64 magnitude;
  int exponent;
};
inline Exact exact(double v) {  // of what is finite
  int exponent;
  const double fraction = std::frexp(std::fabs(v), &exponent);
  return {std::signbit(v), u64(std::ldexp(fraction, 53)), exponent - 53};
}

// The bits of the number of a format that a value is rounded to
inline u64 rounded(Format format, Exact v, Rounding rounding) {
  const u64 sign = v.negative ? format.sign() : 0;
  if (!v.magnitude) return sign;
  const int bias = (1 << (format.exponent - 1)) - 1;
  const int top = v.exponent + int(std::bit_width(v.magnitude)) - 1;
  const int last = std::max(top, 1 - bias) - format.fraction;  // exponent of the last bit that is kept
  const int shift = last - v.exponent;
  u64 kept = 0;
  if (shift <= 0) {
    kept = v.magnitude << -shift;
  } else {
    const bool below_half = shift > 64;
    kept = shift >= 64 ? 0 : v.magnitude >> shift;
    const u64 rest = shift >= 64 ? v.magnitude : v.magnitude & ((1ull << shift) - 1);
    const u64 half = below_half ? 0 : 1ull << (shift - 1);
    const bool above = !below_half && rest > half, middle = !below_half && rest == half;
    switch (rounding) {
      case Rounding::NearestEven: kept += above || (middle && (kept & 1)); break;
      case Rounding::NearestAway: kept += above || middle; break;
      case Rounding::Up: kept += rest && !v.negative; break;
      case Rounding::Down: kept += rest && v.negative; break;
      case Rounding::Zero: break;
    }
  }
  // The leading one adds to the exponent, and so does a carry out of the fraction.
  const u64 bits = (u64(last + format.fraction + bias - 1) << format.fraction) + kept;
  if (bits < format.infinity()) return sign | bits;
  const bool inwards = rounding == Rounding::Zero || rounding == (v.negative ? Rounding::Up : Rounding::Down);
  return sign | (inwards ? format.largest() : format.infinity());
}
inline u64 rounded(Format format, double v, Rounding rounding) {
  if (v != v) return format.nan();
  if (std::isinf(v)) return (v < 0 ? format.sign() : 0) | format.infinity();
  return rounded(format, exact(v), rounding);
}
// The same with .satfinite: nothing but a NaN is beyond the largest number.
inline u64 rounded_finite(Format format, double v, Rounding rounding) {
  const u64 bits = rounded(format, v, rounding), size = bits & (format.sign() - 1);
  return v == v && size > format.largest() ? (bits & format.sign()) | format.largest() : bits;
}

}  // namespace emu
