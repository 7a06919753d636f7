// Integer arithmetic and logic, of 16, 32 and 64 bits and pairs of 16; without carries (.cc) and saturation.
#include "arithmetic.h"
#include "families.h"

namespace emu {

namespace {

// clang-format off
// Division by zero and of the least integer by -1 has no exception, and no result that PTX specifies.
template <class T> struct Div {
  static T f(T a, T b) { return b == 0 ? T(-1) : b == T(-1) && T(-1) < T(0) ? T(0) - a : a / b; }
};
template <class T> struct Rem {
  static T f(T a, T b) { return b == 0 ? a : b == T(-1) && T(-1) < T(0) ? T(0) : a % b; }
};
template <class T> struct Min { static T f(T a, T b) { return a < b ? a : b; } };
template <class T> struct Max { static T f(T a, T b) { return a > b ? a : b; } };
struct SignedMin16 { static u16 f(u16 a, u16 b) { return s16(a) < s16(b) ? a : b; } };
struct SignedMax16 { static u16 f(u16 a, u16 b) { return s16(a) > s16(b) ? a : b; } };
// .relu: "clamps the result to 0 if negative".
template <class F> struct Relu {
  static s32 f(s32 a, s32 b) { return Max<s32>::f(F::f(a, b), 0); }
};
template <class F> struct Relu16 {
  static u16 f(u16 a, u16 b) { return SignedMax16::f(F::f(a, b), 0); }
};
template <class T> struct And { static T f(T a, T b) { return a & b; } };
template <class T> struct Or { static T f(T a, T b) { return a | b; } };
template <class T> struct Xor { static T f(T a, T b) { return a ^ b; } };
template <class T> struct Not { static T f(T a) { return T(~a); } };
template <class T> struct Neg { static T f(T a) { return T(0) - a; } };
template <class T> struct Abs { static T f(T a) { return T(-1) < T(0) && a < T(1) ? T(0) - a : a; } };
template <class T> struct Mad { static T f(T a, T b, T c) { return a * b + c; } };
template <class D, class A> struct MulWide { static D f(A a, A b) { return D(a) * D(b); } };
template <class D, class A> struct MadWide { static D f(A a, A b, D c) { return D(a) * D(b) + c; } };
template <class T, class D> struct MulHi { static T f(T a, T b) { return T((D(a) * D(b)) >> (8 * sizeof(T))); } };
template <class T, class D> struct MadHi { static T f(T a, T b, T c) { return MulHi<T, D>::f(a, b) + c; } };
// clang-format on

template <template <class> class F>
Handler integer1(Type t) {
  return for_integer(t, []<class T>(T) { return same1<T, F<T>>; });
}
template <template <class> class F>
Handler integer2(Type t) {
  return for_integer(t, []<class T>(T) { return same2<T, F<T>>; });
}

// min.relu and max.relu, of s32 and s16x2 alone.
void decode_relu(Decoder& d, Instruction& i) {
  const bool least = i.name() == "min";
  if (i.words.size() != 3 || i.word(1) != "relu" || (!least && i.name() != "max")) d.bad("modifier");
  Handler fn = nullptr;
  if (i.type == Type::S32) fn = least ? same2<s32, Relu<Min<s32>>> : same2<s32, Relu<Max<s32>>>;
  if (i.type == Type::S16x2)
    fn = least ? same2<u32, Pair2<Relu16<SignedMin16>>> : same2<u32, Pair2<Relu16<SignedMax16>>>;
  if (!fn) d.bad("modifier");
  d.binary(i, 32, fn);
}

void decode_pairs(Decoder& d, Instruction& i) {
  if (i.words.size() != 2) d.bad("modifier");
  const std::string& name = i.name();
  const bool sign = i.type == Type::S16x2;
  Handler fn = nullptr;
  if (name == "add") fn = same2<u32, Pair2<Add<u16>>>;
  if (name == "sub") fn = same2<u32, Pair2<Sub<u16>>>;
  if (name == "min") fn = sign ? same2<u32, Pair2<SignedMin16>> : same2<u32, Pair2<Min<u16>>>;
  if (name == "max") fn = sign ? same2<u32, Pair2<SignedMax16>> : same2<u32, Pair2<Max<u16>>>;
  if (fn) d.binary(i, 32, fn);
}

template <class D, class A>
Handler wide(bool mad) {
  return mad ? &map3<D, A, A, D, MadWide<D, A>> : &map2<D, A, A, MulWide<D, A>>;
}
template <class T, class D>
Handler high(bool mad) {
  return mad ? same3<T, MadHi<T, D>> : same2<T, MulHi<T, D>>;
}

void decode_product(Decoder& d, Instruction& i) {
  using s128 = __int128;
  using u128 = unsigned __int128;
  const bool mad = i.name() == "mad";
  const int bits = bits_of(i.type);
  Handler fn = nullptr;
  if (i.word(1) == "wide") {
    if (i.type == Type::U32) fn = wide<u64, u32>(mad);
    if (i.type == Type::S32) fn = wide<s64, s32>(mad);
    if (i.type == Type::U16) fn = wide<u32, u16>(mad);
    if (i.type == Type::S16) fn = wide<s32, s16>(mad);
    if (!fn) return;
    d.expect(i, mad ? 4 : 3);
    i.op.fn = fn;
    i.op.d[0] = d.destination(i.operands[0], 2 * bits);
    for (size_t k = 0; k < 2; k++) i.op.s[k] = d.source(i.operands[k + 1], bits);
    if (mad) i.op.s[2] = d.source(i.operands[3], 2 * bits);
    return;
  }
  if (i.word(1) == "lo")
    fn = mad ? for_integer(i.type, []<class T>(T) { return same3<T, Mad<T>>; }) : integer2<Mul>(i.type);
  if (i.word(1) == "hi") {
    if (i.type == Type::U16) fn = high<u16, u32>(mad);
    if (i.type == Type::U32) fn = high<u32, u64>(mad);
    if (i.type == Type::S32) fn = high<s32, s64>(mad);
    if (i.type == Type::U64) fn = high<u64, u128>(mad);
    if (i.type == Type::S64) fn = high<s64, s128>(mad);
  }
  if (mad) d.ternary(i, bits, fn);
  else d.binary(i, bits, fn);
}

}  // namespace

void refuse_modifiers(Decoder& d, const Instruction& i) {
  if (i.has("relu") || i.has("xorsign")) d.bad("modifier");
  if (i.has("rz") || i.has("rm") || i.has("rp")) d.bad("rounding mode");
  if (i.has("sat")) d.bad(".sat");
}

void decode_integers(Decoder& d, Instruction& i) {
  const std::string& name = i.name();
  const Type t = i.type;
  const int bits = bits_of(t);
  if (t == Type::None) return;
  if (i.has("relu")) return decode_relu(d, i);
  if (t == Type::U16x2 || t == Type::S16x2) return decode_pairs(d, i);
  refuse_modifiers(d, i);
  if (i.has("cc")) d.bad("carry");
  if (name == "mul" || name == "mad") return decode_product(d, i);
  if (name == "not") return d.unary(i, bits, integer1<Not>(t));
  if (name == "neg") return d.unary(i, bits, integer1<Neg>(t));
  if (name == "abs") return d.unary(i, bits, integer1<Abs>(t));
  Handler fn = nullptr;
  if (name == "add") fn = integer2<Add>(t);
  if (name == "sub") fn = integer2<Sub>(t);
  if (name == "div") fn = integer2<Div>(t);
  if (name == "rem") fn = integer2<Rem>(t);
  if (name == "min") fn = integer2<Min>(t);
  if (name == "max") fn = integer2<Max>(t);
  if (name == "and") fn = integer2<And>(t);
  if (name == "or") fn = integer2<Or>(t);
  if (name == "xor") fn = integer2<Xor>(t);
  if (fn) d.binary(i, bits, fn);
}

}  // namespace emu
