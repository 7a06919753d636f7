// Shifts and bits: shl, shr, shf, lop3, prmt, bfe, bfi, popc, clz, bfind, brev.
#include <algorithm>
#include <type_traits>

#include "arithmetic.h"
#include "families.h"

namespace emu {

namespace {

// clang-format off
// PTX ISA, shl and shr: amounts of the width and more shift everything out.
template <class T> struct ShiftLeft { static T f(T a, u32 n) { return n >= 8 * sizeof(T) ? T(0) : T(a << n); } };
template <class T> struct ShiftRight {
  static T f(T a, u32 n) {
    constexpr u32 width = 8 * sizeof(T);
    return n >= width ? (T(-1) < T(0) ? T(a >> (width - 1)) : T(0)) : T(a >> n);
  }
};
template <class T> struct CountOnes { static u32 f(T a) { return u32(__builtin_popcountll(a)); } };
template <class T> struct LeadingZeros {
  static u32 f(T a) { return a == 0 ? 8 * sizeof(T) : u32(__builtin_clzll(a)) - (64 - 8 * sizeof(T)); }
};
template <class T> struct Reverse {
  static T f(T a) {
    T r = 0;
    for (u32 k = 0; k < 8 * sizeof(T); k++) r |= T(a >> k & 1) << (8 * sizeof(T) - 1 - k);
    return r;
  }
};
// PTX ISA, bfind: the most significant bit that is not a copy of the sign
template <class T> struct FindHighest {
  static u32 f(T a) {
    using U = std::make_unsigned_t<T>;
    u64 v = T(-1) < T(0) && a < T(1) && a != 0 ? U(~a) : U(a);
    return v == 0 ? 0xffffffffu : u32(63 - __builtin_clzll(v));
  }
};
// clang-format on

template <class T>
constexpr Handler shift_left = &map2<T, T, u32, ShiftLeft<T>>;
template <class T>
constexpr Handler shift_right = &map2<T, T, u32, ShiftRight<T>>;

struct Lop3Options {
  u8 table;
};
// PTX ISA, lop3: bit k of the table is the result where the bits of a, b and c make the number k.
void lop3(Cta&, Warp& w, const Op& o, u32 mask) {
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]), *c = reg<u32>(w, o.s[2]);
  u32* d = reg<u32>(w, o.d[0]);
  const u8 table = o.get<Lop3Options>().table;
  for_lanes(mask, [&](int i) {
    u32 r = 0;
    for (int k = 0; k < 8; k++)
      if (table >> k & 1) r |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
    d[i] = r;
  });
}

void prmt(Cta&, Warp& w, const Op& o, u32 mask) {
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]), *c = reg<u32>(w, o.s[2]);
  u32* d = reg<u32>(w, o.d[0]);
  for_lanes(mask, [&](int i) {
    u64 whole = u64(b[i]) << 32 | a[i];
    u32 r = 0;
    for (int k = 0; k < 4; k++) {
      u32 selector = c[i] >> (4 * k) & 15;
      u32 byte = u32(whole >> (8 * (selector & 7))) & 0xff;
      if (selector & 8) byte = byte & 0x80 ? 0xff : 0;  // replicates the sign
      r |= byte << (8 * k);
    }
    d[i] = r;
  });
}

struct FunnelOptions {
  bool left, wrap;
};
void funnel_shift(Cta&, Warp& w, const Op& o, u32 mask) {
  const u32 *low = reg<u32>(w, o.s[0]), *high = reg<u32>(w, o.s[1]), *amount = reg<u32>(w, o.s[2]);
  u32* d = reg<u32>(w, o.d[0]);
  const auto& options = o.get<FunnelOptions>();
  for_lanes(mask, [&](int i) {
    u32 n = options.wrap ? amount[i] & 31 : std::min(amount[i], 32u);
    u64 whole = u64(high[i]) << 32 | low[i];
    d[i] = options.left ? u32((whole << n) >> 32) : u32(whole >> n);
  });
}

template <class T>
void extract_field(Cta&, Warp& w, const Op& o, u32 mask) {
  using U = std::make_unsigned_t<T>;
  const T* a = reg<T>(w, o.s[0]);
  const u32 *position = reg<u32>(w, o.s[1]), *length = reg<u32>(w, o.s[2]);
  T* d = reg<T>(w, o.d[0]);
  constexpr int width = 8 * sizeof(T);
  for_lanes(mask, [&](int i) {
    int from = position[i] & 0xff, count = length[i] & 0xff;
    bool sign = T(-1) < T(0) && count && (u64(a[i]) >> std::min(from + count - 1, width - 1) & 1);
    U r = 0;
    for (int k = 0; k < width; k++) {
      bool bit = k < count && from + k < width ? (u64(a[i]) >> (from + k)) & 1 : sign;
      r |= U(bit) << k;
    }
    d[i] = T(r);
  });
}

void insert_field(Cta&, Warp& w, const Op& o, u32 mask) {
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]);
  const u32 *position = reg<u32>(w, o.s[2]), *length = reg<u32>(w, o.s[3]);
  for_lanes(mask, [&](int i) {
    u32 from = position[i] & 0xff, count = length[i] & 0xff, r = b[i];
    for (u32 k = 0; k < count && from + k < 32; k++) r = (r & ~(1u << (from + k))) | ((a[i] >> k & 1) << (from + k));
    reg<u32>(w, o.d[0])[i] = r;
  });
}

Handler shift(Type t, bool left) {
  switch (t) {
    case Type::B16:
    case Type::U16: return left ? shift_left<u16> : shift_right<u16>;
    case Type::B32:
    case Type::U32: return left ? shift_left<u32> : shift_right<u32>;
    case Type::B64:
    case Type::U64: return left ? shift_left<u64> : shift_right<u64>;
    case Type::S16: return left ? nullptr : shift_right<s16>;
    case Type::S32: return left ? nullptr : shift_right<s32>;
    case Type::S64: return left ? nullptr : shift_right<s64>;
    default: return nullptr;
  }
}

// Operands of the instruction's type or of 32 bits, as the letters say: 't' or 'w'
void set_operands(Decoder& d, Instruction& i, const char* widths) {
  d.expect(i, strlen(widths));
  auto bits = [&](size_t k) { return widths[k] == 't' ? bits_of(i.type) : 32; };
  i.op.d[0] = d.destination(i.operands[0], bits(0));
  for (size_t k = 1; widths[k]; k++) i.op.s[k - 1] = d.source(i.operands[k], bits(k));
}

}  // namespace

void decode_bits(Decoder& d, Instruction& i) {
  const std::string& name = i.name();
  const Type t = i.type;
  const bool wide = bits_of(t) == 64;
  Op& op = i.op;
  if (bits_of(t) < 16) return;
  if (name == "shl" || name == "shr") {
    op.fn = shift(t, name == "shl");
    set_operands(d, i, "ttw");
  } else if (name == "lop3") {
    d.expect(i, 5);
    for (size_t k = 0; k < 3; k++) op.s[k] = d.source(i.operands[k + 1], 32);
    op.d[0] = d.destination(i.operands[0], 32);
    op.set<Lop3Options>().table = u8(i.operands[4].value);
    op.fn = lop3;
  } else if (name == "prmt") {
    if (i.words.size() != 2) d.bad("prmt mode");
    d.ternary(i, 32, prmt);
  } else if (name == "shf") {
    op.set<FunnelOptions>() = {i.word(1) == "l", i.word(2) == "wrap"};
    d.ternary(i, 32, funnel_shift);
  } else if (name == "bfe") {
    op.fn = t == Type::U32   ? extract_field<u32>
            : t == Type::S32 ? extract_field<s32>
            : t == Type::U64 ? extract_field<u64>
            : t == Type::S64 ? extract_field<s64>
                             : Handler(nullptr);
    set_operands(d, i, "ttww");
  } else if (name == "bfi" && t == Type::B32) {
    op.fn = insert_field;
    set_operands(d, i, "wwwww");
  } else if (name == "popc") {
    op.fn = wide ? &map1<u32, u64, CountOnes<u64>> : &map1<u32, u32, CountOnes<u32>>;
    set_operands(d, i, "wt");
  } else if (name == "clz") {
    op.fn = wide ? &map1<u32, u64, LeadingZeros<u64>> : &map1<u32, u32, LeadingZeros<u32>>;
    set_operands(d, i, "wt");
  } else if (name == "bfind" && i.words.size() == 2) {
    op.fn = for_integer(t, []<class T>(T) -> Handler { return &map1<u32, T, FindHighest<T>>; });
    set_operands(d, i, "wt");
  } else if (name == "brev") {
    d.unary(i, bits_of(t), wide ? same1<u64, Reverse<u64>> : same1<u32, Reverse<u32>>);
  }
}

}  // namespace emu
