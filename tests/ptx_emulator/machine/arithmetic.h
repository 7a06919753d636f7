// Instructions that compute each lane from the operands of that lane: d = f(a), f(a, b), f(a, b, c), where f is a
// struct F with a static function f. With all lanes on, the compiler makes them vector instructions.
#pragma once
#include "decoder.h"
#include "lanes.h"
#include "numbers.h"

namespace emu {

template <class D, class A, class F>
void map1(Cta&, Warp& w, const Op& o, u32 mask) {
  D* d = reg<D>(w, o.d[0]);
  const A* a = reg<A>(w, o.s[0]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) d[i] = F::f(a[i]);
  } else {
    for_lanes(mask, [&](int i) { d[i] = F::f(a[i]); });
  }
}

template <class D, class A, class B, class F>
void map2(Cta&, Warp& w, const Op& o, u32 mask) {
  D* d = reg<D>(w, o.d[0]);
  const A* a = reg<A>(w, o.s[0]);
  const B* b = reg<B>(w, o.s[1]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) d[i] = F::f(a[i], b[i]);
  } else {
    for_lanes(mask, [&](int i) { d[i] = F::f(a[i], b[i]); });
  }
}

template <class D, class A, class B, class C, class F>
void map3(Cta&, Warp& w, const Op& o, u32 mask) {
  D* d = reg<D>(w, o.d[0]);
  const A* a = reg<A>(w, o.s[0]);
  const B* b = reg<B>(w, o.s[1]);
  const C* c = reg<C>(w, o.s[2]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) d[i] = F::f(a[i], b[i], c[i]);
  } else {
    for_lanes(mask, [&](int i) { d[i] = F::f(a[i], b[i], c[i]); });
  }
}

// Operands and results have one type
template <class T, class F>
constexpr Handler same1 = &map1<T, T, F>;
template <class T, class F>
constexpr Handler same2 = &map2<T, T, T, F>;
template <class T, class F>
constexpr Handler same3 = &map3<T, T, T, T, F>;

// clang-format off
template <class T> struct Add { static T f(T a, T b) { return a + b; } };
template <class T> struct Sub { static T f(T a, T b) { return a - b; } };
template <class T> struct Mul { static T f(T a, T b) { return a * b; } };

// Two 16-bit values in a register of 32 bits
template <class F> struct Pair1 {
  static u32 f(u32 a) { return F::f(u16(a)) | u32(F::f(u16(a >> 16))) << 16; }
};
template <class F> struct Pair2 {
  static u32 f(u32 a, u32 b) { return F::f(u16(a), u16(b)) | u32(F::f(u16(a >> 16), u16(b >> 16))) << 16; }
};
template <class F> struct Pair3 {
  static u32 f(u32 a, u32 b, u32 c) {
    return F::f(u16(a), u16(b), u16(c)) | u32(F::f(u16(a >> 16), u16(b >> 16), u16(c >> 16))) << 16;
  }
};
// clang-format on

// The handler that `pick` gives for the C++ type of an integer type, e.g. `[]<class T>(T) { return same2<T, Add<T>>; }`
template <class Pick>
Handler for_integer(Type t, Pick pick) {
  switch (t) {
    case Type::U16:
    case Type::B16: return pick(u16{});
    case Type::S16: return pick(s16{});
    case Type::U32:
    case Type::B32: return pick(u32{});
    case Type::S32: return pick(s32{});
    case Type::U64:
    case Type::B64: return pick(u64{});
    case Type::S64: return pick(s64{});
    default: return nullptr;
  }
}

// Modifiers that arithmetic has and that are not implemented
void refuse_modifiers(Decoder&, const Instruction&);

}  // namespace emu
