// Types that the names of instructions end in. Registers have a width and no type.
#pragma once
#include "basics.h"

namespace emu {

// PTX ISA, Fundamental Types, and those that instructions add
enum class Type : u8 {
  None,
  Pred,
  B8,
  U8,
  S8,
  B16,
  U16,
  S16,
  B32,
  U32,
  S32,
  B64,
  U64,
  S64,
  B128,
  F16,
  F16x2,
  BF16,
  BF16x2,
  TF32,
  F32,
  F32x2,
  F64,
  U16x2,
  S16x2,
  E4M3,
  E5M2,
  UE8M0,
  E4M3x2,
  E5M2x2,
  UE8M0x2
};
int bits_of(Type);
bool is_signed(Type);
bool is_float(Type);  // of those that arithmetic computes with
Type half_of(Type);   // the type of one element of a pair of floats; Type::None of other types
Type type_named(const std::string& name);

}  // namespace emu
