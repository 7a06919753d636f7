// Names and widths of types.
#include "types.h"

#include <unordered_map>

namespace emu {

int bits_of(Type t) {
  switch (t) {
    case Type::None: return 0;
    case Type::Pred: return 1;
    case Type::B8:
    case Type::U8:
    case Type::S8:
    case Type::E4M3:
    case Type::E5M2:
    case Type::UE8M0: return 8;
    case Type::B16:
    case Type::U16:
    case Type::S16:
    case Type::F16:
    case Type::BF16:
    case Type::E4M3x2:
    case Type::E5M2x2:
    case Type::UE8M0x2: return 16;
    case Type::B64:
    case Type::U64:
    case Type::S64:
    case Type::F64:
    case Type::F32x2: return 64;
    case Type::B128: return 128;
    default: return 32;
  }
}
bool is_signed(Type t) { return t == Type::S8 || t == Type::S16 || t == Type::S32 || t == Type::S64; }
bool is_float(Type t) {
  return t == Type::F32 || t == Type::F32x2 || t == Type::F64 || t == Type::F16 || t == Type::BF16 ||
         t == Type::F16x2 || t == Type::BF16x2;
}
Type half_of(Type t) {
  switch (t) {
    case Type::F16x2: return Type::F16;
    case Type::BF16x2: return Type::BF16;
    case Type::E4M3x2: return Type::E4M3;
    case Type::E5M2x2: return Type::E5M2;
    case Type::UE8M0x2: return Type::UE8M0;
    default: return Type::None;
  }
}
Type type_named(const std::string& name) {
  // clang-format off
  static const std::unordered_map<std::string, Type> types = {
      {"pred", Type::Pred}, {"b8", Type::B8}, {"u8", Type::U8}, {"s8", Type::S8},
      {"b16", Type::B16}, {"u16", Type::U16}, {"s16", Type::S16},
      {"b32", Type::B32}, {"u32", Type::U32}, {"s32", Type::S32},
      {"b64", Type::B64}, {"u64", Type::U64}, {"s64", Type::S64}, {"b128", Type::B128},
      {"f16", Type::F16}, {"bf16", Type::BF16}, {"tf32", Type::TF32}, {"f32", Type::F32}, {"f32x2", Type::F32x2}, {"f64", Type::F64},
      {"f16x2", Type::F16x2}, {"bf16x2", Type::BF16x2}, {"u16x2", Type::U16x2}, {"s16x2", Type::S16x2},
      {"e4m3", Type::E4M3}, {"e5m2", Type::E5M2},
      {"e4m3x2", Type::E4M3x2}, {"e5m2x2", Type::E5M2x2}, {"ue8m0x2", Type::UE8M0x2}};
  // clang-format on
  auto found = types.find(name);
  return found == types.end() ? Type::None : found->second;
}

}  // namespace emu
