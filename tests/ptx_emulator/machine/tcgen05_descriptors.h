// Contents of the descriptors of tcgen05.mma: the instruction descriptor (types, signs, major-nesses, shape) and the
// matrix descriptors.
#pragma once
#include "matrix_operands.h"

namespace emu {

enum class MmaKind : u8 { None, F16, TF32, F8, MXF8 };  // the last two: .kind::f8f6f4, .kind::mxf8f6f4

// PTX ISA, tcgen05: Instruction descriptor
struct MmaShape {
  Element a, b;
  bool half_d;  // D is fp16, else fp32
  bool negate_a, negate_b, mn_major_a, mn_major_b;
  u32 m, n, k;
  u32 scale_byte_a, scale_byte_b;  // of .kind::mxf8f6f4: "scale factor data ID"
};
MmaShape unpack_instruction(Cta&, Warp&, const Op&, MmaKind, u32 bits);

// PTX ISA, tcgen05: Shared memory descriptor
OperandLayout unpack_matrix(Cta&, Warp&, const Op&, u64 bits, bool tf32, bool mn_major, const char* name);

}  // namespace emu
