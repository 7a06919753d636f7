// cvt between integers and floats. Values pass through a 64-bit integer or an fp64, which hold them exactly, and are
// rounded once; the frequent conversions have handlers of their own. 8-bit floats come in pairs, and without .rs.
#include <algorithm>
#include <limits>

#include "arithmetic.h"
#include "families.h"
#include "rounding.h"

namespace emu {

namespace {

struct Conversion {
  Type to, from;  // of the elements of pairs
  Rounding rounding;
  bool integral;  // .rni, .rzi, .rmi, .rpi
  bool saturate, finite, flush, relu;
  u8 to_bits, from_bits;  // of the registers
};

double round_integral(double v, Rounding rounding) {
  switch (rounding) {
    case Rounding::NearestEven: return std::nearbyint(v);
    case Rounding::Zero: return std::trunc(v);
    case Rounding::Down: return std::floor(v);
    case Rounding::Up: return std::ceil(v);
    default: return std::round(v);
  }
}

template <class T>
T clamp_to(double v) {
  double low = double(std::numeric_limits<T>::min()), high = double(std::numeric_limits<T>::max());
  return v <= low ? std::numeric_limits<T>::min() : v >= high ? std::numeric_limits<T>::max() : T(v);
}
// PTX ISA, cvt: floats out of range give the nearest integer that there is. A NaN gives the highest bit alone where the
// source or the destination has 64 bits, else zero.
u64 to_integer(Type to, Type from, double v) {
  if (v != v) return bits_of(to) == 64 || from == Type::F64 ? 1ull << (bits_of(to) - 1) : 0;
  switch (to) {
    case Type::U8: return clamp_to<u8>(v);
    case Type::S8: return u64(s64(clamp_to<s8>(v)));
    case Type::U16: return clamp_to<u16>(v);
    case Type::S16: return u64(s64(clamp_to<s16>(v)));
    case Type::U32: return clamp_to<u32>(v);
    case Type::S32: return u64(s64(clamp_to<s32>(v)));
    case Type::U64: return clamp_to<u64>(v);
    default: return u64(clamp_to<s64>(v));
  }
}

u64 integer_source(Type from, u64 raw) {  // extended to 64 bits
  switch (from) {
    case Type::S8: return u64(s64(s8(raw)));
    case Type::S16: return u64(s64(s16(raw)));
    case Type::S32: return u64(s64(s32(raw)));
    default: return bits_of(from) == 64 ? raw : raw & ((1ull << bits_of(from)) - 1);
  }
}
double float_source(const Conversion& c, u64 raw) {
  switch (c.from) {
    case Type::F32: return c.flush ? flush_denormal(from_bits(u32(raw))) : from_bits(u32(raw));
    case Type::F16: return FP16::load(u16(raw));
    case Type::BF16: return BF16::load(u16(raw));
    case Type::E4M3: return E4M3::load(u8(raw));
    case Type::E5M2: return E5M2::load(u8(raw));
    case Type::UE8M0: return UE8M0::load(u8(raw));
    default: {
      double v;
      memcpy(&v, &raw, 8);
      return v;
    }
  }
}
u64 narrowed(Type to, u64 v) { return integer_source(to, v); }

u64 saturated(const Conversion& c, u64 v) {
  const bool huge = (c.from == Type::U64 || c.from == Type::B64) && v >> 63;  // not what it seems as a signed integer
  auto clamp = [&](s64 low, s64 high) { return u64(huge ? high : std::clamp(s64(v), low, high)); };
  switch (c.to) {
    case Type::U8: return clamp(0, 0xff);
    case Type::S8: return clamp(-0x80, 0x7f);
    case Type::U16: return clamp(0, 0xffff);
    case Type::S16: return clamp(-0x8000, 0x7fff);
    case Type::U32: return clamp(0, 0xffffffffll);
    case Type::S32: return clamp(-0x80000000ll, 0x7fffffffll);
    default: return v;
  }
}

Format format_of(Type t) {
  switch (t) {
    case Type::F16: return FORMAT_F16;
    case Type::BF16: return FORMAT_BF16;
    case Type::TF32: return FORMAT_TF32;
    case Type::E4M3: return FORMAT_E4M3;
    case Type::E5M2: return FORMAT_E5M2;
    case Type::F32: return FORMAT_F32;
    default: return FORMAT_F64;
  }
}

// The power of two next to the absolute value, down (.rz) or up (.rp); zero gives the least.
u64 to_power_of_two(const Conversion& c, double v) {
  if (v != v) return UE8M0::NOT_A_NUMBER;
  const u64 beyond = c.finite ? UE8M0::TOP : UE8M0::NOT_A_NUMBER;
  if (std::isinf(v)) return beyond;
  int exponent;  // v lies in 2^(exponent - 1) * [1, 2)
  const double fraction = std::frexp(std::fabs(v), &exponent);
  if (fraction == 0) return 0;
  const int power = exponent - 1 + (c.rounding == Rounding::Up && fraction > 0.5) + UE8M0::BIAS;
  return power > UE8M0::TOP ? beyond : u64(std::max(power, 0));
}

u64 float_to_float(const Conversion& c, double v) {
  if (c.to == Type::UE8M0) return to_power_of_two(c, v);
  if (c.integral) v = round_integral(v, c.rounding);
  if (c.saturate) v = v != v ? 0 : std::clamp(v, 0.0, 1.0);
  if (c.relu && v < 0) v = 0;
  const Format format = format_of(c.to);
  const u64 bits = c.finite ? rounded_finite(format, v, c.rounding) : rounded(format, v, c.rounding);
  if (c.to == Type::TF32) return v != v ? CANONICAL_NAN_32 : bits << 13;
  return c.to == Type::F32 && c.flush ? to_bits(flush_denormal(from_bits(u32(bits)))) : bits;
}
u64 integer_to_float(const Conversion& c, u64 v) {
  const bool negative = is_signed(c.from) && s64(v) < 0;
  return rounded(format_of(c.to), Exact{negative, negative ? 0 - v : v, 0}, c.rounding);
}

bool is_8_bit_float(Type t) { return t == Type::E4M3 || t == Type::E5M2; }
bool is_any_float(Type t) { return is_float(t) || is_8_bit_float(t) || t == Type::UE8M0 || t == Type::TF32; }

u64 convert(const Conversion& c, u64 raw) {
  if (is_any_float(c.from)) {
    const double v = float_source(c, raw);
    if (is_any_float(c.to)) return float_to_float(c, v);
    return to_integer(c.to, c.from, round_integral(v, c.rounding));
  }
  const u64 v = integer_source(c.from, raw);
  if (is_float(c.to)) return integer_to_float(c, v);
  return c.saturate ? saturated(c, v) : narrowed(c.to, v);
}

void any_conversion(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& c = o.get<Conversion>();
  for_lanes(mask, [&](int i) {
    write_unsigned(w, o.d[0], c.to_bits, i, convert(c, read_unsigned(w, o.s[0], c.from_bits, i)));
  });
}
// Two fp32 to a pair, the first to the upper half
void any_pair(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& c = o.get<Conversion>();
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]);
  for_lanes(mask, [&](int i) {
    write_unsigned(w, o.d[0], c.to_bits, i, convert(c, a[i]) << c.to_bits / 2 | convert(c, b[i]));
  });
}
// A pair to a pair
void any_two(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& c = o.get<Conversion>();
  for_lanes(mask, [&](int i) {
    const u64 both = read_unsigned(w, o.s[0], c.from_bits, i);  // of the lower one, the rest is ignored
    write_unsigned(w, o.d[0], c.to_bits, i, convert(c, both >> c.from_bits / 2) << c.to_bits / 2 | convert(c, both));
  });
}

// clang-format off
template <class H> struct ToHalf { static u16 f(float a) { return H::store(a); } };
template <class H> struct FromHalf { static float f(u16 a) { return H::load(a); } };
template <class H> struct ToPair {
  static u32 f(float a, float b) { return u32(H::store(a)) << 16 | H::store(b); }
};
template <class D, class A> struct Cast { static D f(A a) { return D(a); } };
// clang-format on
template <class D, class A>
constexpr Handler cast = &map1<D, A, Cast<D, A>>;

// The handler of a conversion without modifiers between registers of the types' widths; or none
Handler frequent(const Conversion& c) {
  const Type to = c.to, from = c.from;
  const bool nearest = c.rounding == Rounding::NearestEven;
  const bool to_64 = to == Type::S64 || to == Type::U64, to_32 = to == Type::S32 || to == Type::U32;
  if (to == Type::F32 && from == Type::BF16) return &map1<float, u16, FromHalf<BF16>>;
  if (to == Type::F32 && from == Type::F16) return &map1<float, u16, FromHalf<FP16>>;
  if (to == Type::BF16 && from == Type::F32 && nearest) return &map1<u16, float, ToHalf<BF16>>;
  if (to == Type::F16 && from == Type::F32 && nearest) return &map1<u16, float, ToHalf<FP16>>;
  if (to_64 && from == Type::S32) return cast<s64, s32>;
  if (to_64 && from == Type::U32) return cast<u64, u32>;
  if (to_32 && (from == Type::U64 || from == Type::S64)) return cast<u32, u64>;
  if (to == Type::F32 && from == Type::S32 && nearest) return cast<float, s32>;
  if (to == Type::F32 && from == Type::U32 && nearest) return cast<float, u32>;
  return nullptr;
}

Conversion modifiers(Decoder& d, const Instruction& i) {
  static const std::map<std::string, Rounding> roundings = {
      {"rn", Rounding::NearestEven}, {"rz", Rounding::Zero},         {"rm", Rounding::Down},
      {"rp", Rounding::Up},          {"rna", Rounding::NearestAway}, {"rni", Rounding::NearestEven},
      {"rzi", Rounding::Zero},       {"rmi", Rounding::Down},        {"rpi", Rounding::Up}};
  Conversion c{};
  for (size_t k = 1; k < i.words.size(); k++) {
    const std::string& word = i.words[k];
    if (auto found = roundings.find(word); found != roundings.end()) {
      c.rounding = found->second;
      c.integral |= word.size() == 3 && word[2] == 'i';
    } else if (word == "sat") {
      c.saturate = true;
    } else if (word == "satfinite") {
      c.finite = true;
    } else if (word == "ftz") {
      c.flush = true;
    } else if (word == "relu") {
      c.relu = true;
    } else if (type_named(word) == Type::None) {
      d.bad("cvt modifier " + word);
    }
  }
  return c;
}

// PTX ISA, cvt: 8-bit floats are made of fp32 and of fp16, and only fp16 is made of them; scales go with bf16.
bool is_pair_known(const Conversion& c) {
  if (c.from == Type::F32) return c.to != Type::None;
  if (c.from == Type::F16) return is_8_bit_float(c.to);
  if (is_8_bit_float(c.from)) return c.to == Type::F16;
  return (c.from == Type::BF16 && c.to == Type::UE8M0) || (c.from == Type::UE8M0 && c.to == Type::BF16);
}
void check_pair_modifiers(Decoder& d, const Instruction& i, const Conversion& c) {
  if (bits_of(c.to) != 8 && bits_of(c.from) != 8) return;
  const bool scales = c.to == Type::UE8M0 || c.from == Type::UE8M0;
  if (c.integral || c.saturate || c.flush || (c.relu && scales)) d.bad("cvt modifier");
  if (c.to == Type::UE8M0 ? !i.has("rz") && !i.has("rp") : !i.has("rn")) d.bad("cvt rounding");
  if (is_8_bit_float(c.to) != c.finite && c.to != Type::UE8M0) d.bad("cvt.satfinite");
}

void decode_pair(Decoder& d, Instruction& i, Conversion& c) {
  const bool of_two = c.from == Type::F32;
  c.to_bits = u8(bits_of(c.to)), c.from_bits = u8(bits_of(c.from));
  c.to = half_of(c.to), c.from = of_two ? c.from : half_of(c.from);
  if (!is_pair_known(c)) d.bad("cvt to a pair");
  check_pair_modifiers(d, i, c);
  d.expect(i, of_two ? 3 : 2);
  i.op.d[0] = d.destination(i.operands[0], c.to_bits);
  for (size_t k = 1; k < i.operands.size(); k++) i.op.s[k - 1] = d.source(i.operands[k], c.from_bits);
  const bool plain =
      c.rounding == Rounding::NearestEven && !c.integral && !c.saturate && !c.finite && !c.flush && !c.relu;
  i.op.fn = of_two ? any_pair : any_two;
  if (plain && of_two && c.to == Type::BF16) i.op.fn = map2<u32, float, float, ToPair<BF16>>;
  if (plain && of_two && c.to == Type::F16) i.op.fn = map2<u32, float, float, ToPair<FP16>>;
}

}  // namespace

void decode_conversion(Decoder& d, Instruction& i) {
  Conversion& c = i.op.set<Conversion>();
  c = modifiers(d, i);
  auto types = i.types();
  if (types.size() != 2) d.bad("cvt types");
  c.to = types[0], c.from = types[1];
  if (half_of(c.to) != Type::None || half_of(c.from) != Type::None) return decode_pair(d, i, c);
  if (c.finite && c.to != Type::F16 && c.to != Type::BF16 && c.to != Type::TF32) d.bad("cvt.satfinite");
  // PTX ISA, Operand Size Exceeding Instruction-Type Size: registers may be wider than the types.
  d.expect(i, 2);
  const Operand &to = i.operands[0], &from = i.operands[1];
  const int to_bits = std::max(16, bits_of(c.to)), from_bits = std::max(16, bits_of(c.from));
  if (!to.is(Operand::Kind::Register)) d.bad("cvt destination");
  c.to_bits = u8(to.reg.bits);
  c.from_bits = from.is(Operand::Kind::Register) ? u8(from.reg.bits) : u8(from_bits);
  if (c.to_bits < to_bits) d.bad("cvt destination too narrow");
  if (c.from_bits < from_bits) d.bad("cvt source too narrow");
  i.op.d[0] = d.destination(to, c.to_bits);
  i.op.s[0] = d.source(from, c.from_bits);
  const bool plain =
      c.to_bits == to_bits && c.from_bits == from_bits && !c.saturate && !c.finite && !c.flush && !c.relu;
  i.op.fn = any_conversion;
  if (Handler fn = plain ? frequent(c) : nullptr) i.op.fn = fn;
}

}  // namespace emu
