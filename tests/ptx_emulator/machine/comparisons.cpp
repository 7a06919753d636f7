// setp, selp and the logic of predicates. A predicate is a mask with a bit for each lane.
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "arithmetic.h"
#include "families.h"

namespace emu {

namespace {

// clang-format off
// PTX ISA, Floating Point Comparisons: those that end in u are true where an operand is NaN, the others are false.
template <class T> struct Eq { static bool f(T a, T b) { return a == b; } };
template <class T> struct Ne { static bool f(T a, T b) { return a < b || a > b; } };
template <class T> struct Lt { static bool f(T a, T b) { return a < b; } };
template <class T> struct Le { static bool f(T a, T b) { return a <= b; } };
template <class T> struct Gt { static bool f(T a, T b) { return a > b; } };
template <class T> struct Ge { static bool f(T a, T b) { return a >= b; } };
template <class T> struct Equ { static bool f(T a, T b) { return !(a < b || a > b); } };
template <class T> struct Neu { static bool f(T a, T b) { return !(a == b); } };
template <class T> struct Ltu { static bool f(T a, T b) { return !(a >= b); } };
template <class T> struct Leu { static bool f(T a, T b) { return !(a > b); } };
template <class T> struct Gtu { static bool f(T a, T b) { return !(a <= b); } };
template <class T> struct Geu { static bool f(T a, T b) { return !(a < b); } };
template <class T> struct Num { static bool f(T a, T b) { return a == a && b == b; } };
template <class T> struct Nan { static bool f(T a, T b) { return a != a || b != b; } };
template <class F> struct Flushed {  // .ftz
  static bool f(float a, float b) { return F::f(flush_denormal(a), flush_denormal(b)); }
};
// clang-format on

enum class Logic : u8 { Move, And, Or, Xor, Not };
u32 apply(Logic logic, u32 a, u32 b) {
  switch (logic) {
    case Logic::And: return a & b;
    case Logic::Or: return a | b;
    case Logic::Xor: return a ^ b;
    case Logic::Not: return ~a;
    default: return a;
  }
}

struct CompareOptions {
  Logic logic;  // with the predicate s[2]
  bool negated;
};
void set_results(Warp& w, const Op& o, u32 mask, u32 p, u32 q) {
  const auto& options = o.get<CompareOptions>();
  if (options.logic != Logic::Move) {
    u32 other = predicate(w, o.s[2], options.negated);
    p = apply(options.logic, p, other), q = apply(options.logic, q, other);
  }
  set_predicate(w, o.d[0], mask, p);
  if (o.d[1] != NONE) set_predicate(w, o.d[1], mask, q);
}

u32 mask_of_bytes(const u8* bytes) {
#ifdef __AVX2__
  return u32(_mm256_movemask_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes))));
#else
  u32 mask = 0;
  for (int i = 0; i < LANES; i++) mask |= u32(bytes[i] >> 7) << i;
  return mask;
#endif
}

template <class T, class F>
void compare(Cta&, Warp& w, const Op& o, u32 mask) {
  const T *a = reg<T>(w, o.s[0]), *b = reg<T>(w, o.s[1]);
  alignas(32) u8 results[LANES];
#pragma GCC ivdep
  for (int i = 0; i < LANES; i++) results[i] = F::f(a[i], b[i]) ? 0xff : 0;
  u32 p = mask_of_bytes(results);
  set_results(w, o, mask, p, ~p);
}
template <class H, class F>
void compare_halves(Cta&, Warp& w, const Op& o, u32 mask) {
  const u16 *a = reg<u16>(w, o.s[0]), *b = reg<u16>(w, o.s[1]);
  u32 p = 0;
  for (int i = 0; i < LANES; i++) p |= u32(F::f(H::load(a[i]), H::load(b[i]))) << i;
  set_results(w, o, mask, p, ~p);
}
template <class H, class F>
void compare_pairs(Cta&, Warp& w, const Op& o, u32 mask) {  // p of the lower halves, q of the upper ones
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]);
  u32 p = 0, q = 0;
  for (int i = 0; i < LANES; i++) {
    p |= u32(F::f(H::load(u16(a[i])), H::load(u16(b[i])))) << i;
    q |= u32(F::f(H::load(u16(a[i] >> 16)), H::load(u16(b[i] >> 16)))) << i;
  }
  set_results(w, o, mask, p, q);
}

template <template <class> class F>
Handler compare_as(Type t, bool flush) {
  switch (t) {
    case Type::F32: return flush ? compare<float, Flushed<F<float>>> : compare<float, F<float>>;
    case Type::F64: return compare<double, F<double>>;
    case Type::F16: return compare_halves<FP16, F<float>>;
    case Type::BF16: return compare_halves<BF16, F<float>>;
    case Type::F16x2: return compare_pairs<FP16, F<float>>;
    case Type::BF16x2: return compare_pairs<BF16, F<float>>;
    default: return for_integer(t, []<class T>(T) -> Handler { return compare<T, F<T>>; });
  }
}
Handler comparison(const std::string& name, Type t, bool flush) {
  static const std::map<std::string, Handler (*)(Type, bool)> handlers = {
      {"eq", compare_as<Eq>},   {"ne", compare_as<Ne>},   {"lt", compare_as<Lt>},   {"lo", compare_as<Lt>},
      {"le", compare_as<Le>},   {"ls", compare_as<Le>},   {"gt", compare_as<Gt>},   {"hi", compare_as<Gt>},
      {"ge", compare_as<Ge>},   {"hs", compare_as<Ge>},   {"equ", compare_as<Equ>}, {"neu", compare_as<Neu>},
      {"ltu", compare_as<Ltu>}, {"leu", compare_as<Leu>}, {"gtu", compare_as<Gtu>}, {"geu", compare_as<Geu>},
      {"num", compare_as<Num>}, {"nan", compare_as<Nan>}};
  auto found = handlers.find(name);
  return found == handlers.end() ? nullptr : found->second(t, flush);
}

struct SelectOptions {
  bool negated;
};
template <class T>
void select(Cta&, Warp& w, const Op& o, u32 mask) {
  T* d = reg<T>(w, o.d[0]);
  const T *a = reg<T>(w, o.s[0]), *b = reg<T>(w, o.s[1]);
  const u32 c = predicate(w, o.s[2], o.get<SelectOptions>().negated);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) d[i] = (c >> i & 1) ? a[i] : b[i];
  } else {
    for_lanes(mask, [&](int i) { d[i] = on(c, i) ? a[i] : b[i]; });
  }
}
void decode_select(Decoder& d, Instruction& i) {
  d.expect(i, 4);
  const int bits = bits_of(i.type);
  i.op.fn = bits == 16 ? select<u16> : bits == 32 ? select<u32> : bits == 64 ? select<u64> : Handler(nullptr);
  i.op.d[0] = d.destination(i.operands[0], bits);
  for (size_t k = 0; k < 2; k++) i.op.s[k] = d.source(i.operands[k + 1], bits);
  i.op.s[2] = d.source(i.operands[3], 1);
  i.op.set<SelectOptions>().negated = i.operands[3].negated;
}

struct LogicOptions {
  Logic logic;
};
void predicate_logic(Cta&, Warp& w, const Op& o, u32 mask) {
  u32 b = o.s[1] == NONE ? 0 : predicate(w, o.s[1]);
  set_predicate(w, o.d[0], mask, apply(o.get<LogicOptions>().logic, predicate(w, o.s[0]), b));
}

}  // namespace

void decode_comparison(Decoder& d, Instruction& i) {
  if (i.name() == "selp") return decode_select(d, i);
  static const std::map<std::string, Logic> logics = {{"and", Logic::And}, {"or", Logic::Or}, {"xor", Logic::Xor}};
  auto& options = i.op.set<CompareOptions>();
  size_t at = 2;
  if (auto found = logics.find(i.word(at)); found != logics.end()) options.logic = found->second, at++;
  const bool flush = i.word(at) == "ftz";
  if (flush) at++;
  if (at + 1 != i.words.size() || i.type == Type::None) d.bad("setp modifiers");
  const bool with_logic = options.logic != Logic::Move;
  d.expect(i, with_logic ? 4 : 3);
  i.op.d[0] = d.destination(i.operands[0], 1);
  i.op.d[1] = d.second_destination(i.operands[0]);
  for (size_t k = 0; k < 2; k++) i.op.s[k] = d.source(i.operands[k + 1], bits_of(i.type));
  if (with_logic) i.op.s[2] = d.source(i.operands[3], 1), options.negated = i.operands[3].negated;
  i.op.fn = comparison(i.word(1), i.type, flush);
}

// mov, and, or, xor, not of predicates
void decode_predicates(Decoder& d, Instruction& i) {
  static const std::map<std::string, Logic> logics = {
      {"mov", Logic::Move}, {"and", Logic::And}, {"or", Logic::Or}, {"xor", Logic::Xor}, {"not", Logic::Not}};
  Logic logic = logics.at(i.name());
  const bool one = logic == Logic::Move || logic == Logic::Not;
  d.expect(i, one ? 2 : 3);
  if (logic == Logic::Move && i.operands[1].negated) logic = Logic::Not;
  else
    for (auto& o : i.operands)
      if (o.negated) d.bad("negated predicate");
  i.op.set<LogicOptions>().logic = logic;
  i.op.d[0] = d.destination(i.operands[0], 1);
  i.op.s[0] = d.source(i.operands[1], 1);
  if (!one) i.op.s[1] = d.source(i.operands[2], 1);
  i.op.fn = predicate_logic;
}

}  // namespace emu
