// Floating-point arithmetic, rounded to nearest even. 16-bit formats are computed in fp32 and rounded; functions that
// are approximate on the GPU (ex2, lg2, rcp, sqrt, rsqrt, sin, cos, tanh, div.full) are exact here.
#include <bit>

#include "arithmetic.h"
#include "families.h"
#include "float_functions.h"

namespace emu {

namespace {

// clang-format off
template <class T> struct Div { static T f(T a, T b) { return a / b; } };
template <class T> struct Neg { static T f(T a) { return -a; } };
template <class T> struct Abs { static T f(T a) { return std::fabs(a); } };
template <class T> struct CopySign { static T f(T a, T b) { return std::copysign(b, a); } };
// fma of halves: the product is exact in fp64, and the sum rounded to odd there and in fp32, which keeps all that the
// one rounding to nearest needs (S. Boldo, G. Melquiond, Emulation of a FMA and correctly rounded sums, 2008).
struct HalfFma {
  static double add_to_odd(double a, double b) {
    const double sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);
    const bool even = !(std::bit_cast<u64>(sum) & 1);
    return std::isfinite(sum) && error != 0 && even ? std::nextafter(sum, error > 0 ? INFINITY : -INFINITY) : sum;
  }
  static float to_odd(double v) {
    const float f = float(v);
    return double(f) != v && v == v && !(to_bits(f) & 1) ? std::nextafterf(f, double(f) < v ? INFINITY : -INFINITY) : f;
  }
  static float f(float a, float b, float c) { return to_odd(add_to_odd(double(a) * double(b), c)); }
};
struct Ex2 { static float f(float a) { return std::exp2(a); } };
struct Lg2 { static float f(float a) { return std::log2(a); } };
struct Rcp { static float f(float a) { return 1.0f / a; } };
struct Sqrt { static float f(float a) { return std::sqrt(a); } };
struct Rsqrt { static float f(float a) { return float(1.0 / std::sqrt(double(a))); } };
struct Sin { static float f(float a) { return std::sin(a); } };
struct Cos { static float f(float a) { return std::cos(a); } };
struct Tanh { static float f(float a) { return std::tanh(a); } };

template <class H, class F> struct Half1 {
  static u16 f(u16 a) { return H::store(F::f(H::load(a))); }
};
template <class H, class F> struct Half2 {
  static u16 f(u16 a, u16 b) { return H::store(F::f(H::load(a), H::load(b))); }
};
template <class H, class F> struct Half3 {
  static u16 f(u16 a, u16 b, u16 c) { return H::store(F::f(H::load(a), H::load(b), H::load(c))); }
};
// Sign bits only: NaNs pass as they are.
struct HalfAbs { static u16 f(u16 a) { return a & 0x7fff; } };
struct HalfNeg { static u16 f(u16 a) { return a ^ 0x8000; } };
// clang-format on

template <template <class> class F>
Handler wide2(Type t, bool flush) {
  if (t == Type::F32) return flush ? same2<float, Flush2<F<float>>> : same2<float, F<float>>;
  if (t == Type::F64) return same2<double, F<double>>;
  return nullptr;
}
template <template <class> class F>
Handler float2(Type t, bool flush) {
  switch (t) {
    case Type::F16: return same2<u16, Half2<FP16, F<float>>>;
    case Type::BF16: return same2<u16, Half2<BF16, F<float>>>;
    case Type::F16x2: return same2<u32, Pair2<Half2<FP16, F<float>>>>;
    case Type::BF16x2: return same2<u32, Pair2<Half2<BF16, F<float>>>>;
    default: return wide2<F>(t, flush);
  }
}
Handler fma(Type t, bool flush) {
  switch (t) {
    case Type::F32: return flush ? same3<float, Flush3<Fma<float>>> : same3<float, Fma<float>>;
    case Type::F64: return same3<double, Fma<double>>;
    case Type::F16: return same3<u16, Half3<FP16, HalfFma>>;
    case Type::BF16: return same3<u16, Half3<BF16, HalfFma>>;
    case Type::F16x2: return same3<u32, Pair3<Half3<FP16, HalfFma>>>;
    case Type::BF16x2: return same3<u32, Pair3<Half3<BF16, HalfFma>>>;
    default: return nullptr;
  }
}
template <template <class> class F, class H>
Handler sign(Type t, bool flush) {
  switch (t) {
    case Type::F32: return flush ? same1<float, Flush1<F<float>>> : same1<float, F<float>>;
    case Type::F64: return same1<double, F<double>>;
    case Type::F16:
    case Type::BF16: return same1<u16, H>;
    default: return same1<u32, Pair1<H>>;
  }
}
template <class F>
Handler function32(Type t, bool flush) {
  if (t != Type::F32) return nullptr;
  return flush ? same1<float, Flush1<F>> : same1<float, F>;
}
template <class F>
Handler function(Type t, bool flush) {
  if (t == Type::F16) return same1<u16, Half1<FP16, F>>;
  if (t == Type::BF16) return same1<u16, Half1<BF16, F>>;
  return function32<F>(t, flush);
}

}  // namespace

void decode_floats(Decoder& d, Instruction& i) {
  refuse_modifiers(d, i);
  const std::string& name = i.name();
  const Type t = i.type;
  const bool flush = i.has("ftz"), nan = i.has("NaN");
  if (t == Type::F32x2 || i.types().size() == 2 || (i.operands.size() == 4 && (name == "min" || name == "max")))
    return decode_floats_sm100(d, i);
  Handler fn = nullptr;
  if (name == "fma" || (name == "mad" && (t == Type::F32 || t == Type::F64))) {
    if ((fn = fma(t, flush))) d.ternary(i, bits_of(t), fn);
    return;
  }
  if (name == "add") fn = float2<Add>(t, flush);
  if (name == "sub") fn = float2<Sub>(t, flush);
  if (name == "mul") fn = float2<Mul>(t, flush);
  if (name == "div") fn = wide2<Div>(t, flush);
  if (name == "min") fn = nan ? float2<MinNan>(t, flush) : float2<Min>(t, flush);
  if (name == "max") fn = nan ? float2<MaxNan>(t, flush) : float2<Max>(t, flush);
  if (name == "copysign" && t == Type::F32) fn = same2<float, CopySign<float>>;
  if (fn) return d.binary(i, bits_of(t), fn);
  if (name == "neg") fn = sign<Neg, HalfNeg>(t, flush);
  if (name == "abs") fn = sign<Abs, HalfAbs>(t, flush);
  if (name == "ex2") fn = function<Ex2>(t, flush);
  if (name == "tanh") fn = function<Tanh>(t, flush);
  if (name == "lg2") fn = function32<Lg2>(t, flush);
  if (name == "rcp") fn = function32<Rcp>(t, flush);
  if (name == "sqrt") fn = function32<Sqrt>(t, flush);
  if (name == "rsqrt") fn = function32<Rsqrt>(t, flush);
  if (name == "sin") fn = function32<Sin>(t, flush);
  if (name == "cos") fn = function32<Cos>(t, flush);
  if (fn) d.unary(i, bits_of(t), fn);
}

}  // namespace emu
