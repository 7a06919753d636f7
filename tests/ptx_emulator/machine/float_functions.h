// Functions of floats that several families compute with.
#pragma once
#include <cmath>

#include "numbers.h"

namespace emu {

// clang-format off
template <class T> struct Fma { static T f(T a, T b, T c) { return std::fma(a, b, c); } };
// PTX ISA, min and max: a NaN gives the other operand, or with .NaN a NaN; -0 is less than +0.
template <class T> struct Min {
  static T f(T a, T b) { return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b; }
};
template <class T> struct Max {
  static T f(T a, T b) { return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b; }
};
template <class T> struct MinNan { static T f(T a, T b) { return a != a || b != b ? T(NAN) : Min<T>::f(a, b); } };
template <class T> struct MaxNan { static T f(T a, T b) { return a != a || b != b ? T(NAN) : Max<T>::f(a, b); } };

// .ftz
template <class F> struct Flush1 {
  static float f(float a) { return flush_denormal(F::f(flush_denormal(a))); }
};
template <class F> struct Flush2 {
  static float f(float a, float b) { return flush_denormal(F::f(flush_denormal(a), flush_denormal(b))); }
};
template <class F> struct Flush3 {
  static float f(float a, float b, float c) {
    return flush_denormal(F::f(flush_denormal(a), flush_denormal(b), flush_denormal(c)));
  }
};
// clang-format on

}  // namespace emu
