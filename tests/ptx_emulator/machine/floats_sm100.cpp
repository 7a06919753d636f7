// Floating-point arithmetic that sm_100 adds: pairs of fp32, halves that are added to fp32, min and max of three.
#include "arithmetic.h"
#include "families.h"
#include "float_functions.h"

namespace emu {

namespace {

// clang-format off
template <class F> struct TwoFloats2 {
  static u64 f(u64 a, u64 b) {
    auto half = [&](int shift) { return to_bits(F::f(from_bits(u32(a >> shift)), from_bits(u32(b >> shift)))); };
    return half(0) | u64(half(32)) << 32;
  }
};
template <class F> struct TwoFloats3 {
  static u64 f(u64 a, u64 b, u64 c) {
    auto half = [&](int shift) {
      return to_bits(F::f(from_bits(u32(a >> shift)), from_bits(u32(b >> shift)), from_bits(u32(c >> shift))));
    };
    return half(0) | u64(half(32)) << 32;
  }
};
// Products of halves are exact in fp32.
template <class H> struct MixedAdd { static float f(u16 a, float c) { return H::load(a) + c; } };
template <class H> struct MixedSub { static float f(u16 a, float c) { return H::load(a) - c; } };
template <class H> struct MixedFma {
  static float f(u16 a, u16 b, float c) { return std::fma(H::load(a), H::load(b), c); }
};
template <class F> struct OfThree { static float f(float a, float b, float c) { return F::f(F::f(a, b), c); } };
// clang-format on

template <class F>
Handler pairs2(bool flush) {
  return flush ? same2<u64, TwoFloats2<Flush2<F>>> : same2<u64, TwoFloats2<F>>;
}
void decode_pairs(Decoder& d, Instruction& i, bool flush) {
  const std::string& name = i.name();
  if (name == "add") d.binary(i, 64, pairs2<Add<float>>(flush));
  if (name == "sub") d.binary(i, 64, pairs2<Sub<float>>(flush));
  if (name == "mul") d.binary(i, 64, pairs2<Mul<float>>(flush));
  if (name != "fma") return;
  using F = Fma<float>;
  d.ternary(i, 64, flush ? same3<u64, TwoFloats3<Flush3<F>>> : same3<u64, TwoFloats3<F>>);
}

template <class H>
Handler mixed(const std::string& name) {
  if (name == "add") return map2<float, u16, float, MixedAdd<H>>;
  if (name == "sub") return map2<float, u16, float, MixedSub<H>>;
  if (name == "fma") return map3<float, u16, u16, float, MixedFma<H>>;
  return nullptr;
}
// d and the last operand are fp32, the others halves.
void decode_mixed(Decoder& d, Instruction& i, const std::vector<Type>& types) {
  if (types[0] != Type::F32 || (types[1] != Type::F16 && types[1] != Type::BF16)) d.bad("types");
  i.op.fn = types[1] == Type::F16 ? mixed<FP16>(i.name()) : mixed<BF16>(i.name());
  const size_t operands = i.name() == "fma" ? 4 : 3;
  d.expect(i, operands);
  i.op.d[0] = d.destination(i.operands[0], 32);
  for (size_t k = 1; k < operands; k++) i.op.s[k - 1] = d.source(i.operands[k], k + 1 == operands ? 32 : 16);
}

template <class F>
Handler three(bool flush) {
  return flush ? same3<float, Flush3<OfThree<F>>> : same3<float, OfThree<F>>;
}

}  // namespace

void decode_floats_sm100(Decoder& d, Instruction& i) {
  const bool flush = i.has("ftz"), least = i.name() == "min";
  const auto types = i.types();
  if (types.size() == 2) return decode_mixed(d, i, types);
  if (i.type == Type::F32x2) return decode_pairs(d, i, flush);
  if (i.type != Type::F32) return;
  if (i.has("NaN")) d.ternary(i, 32, least ? three<MinNan<float>>(flush) : three<MaxNan<float>>(flush));
  else d.ternary(i, 32, least ? three<Min<float>>(flush) : three<Max<float>>(flush));
}

}  // namespace emu
