// Contents of the descriptors of tcgen05.mma: the instruction descriptor (types, signs, major-nesses, shape) and the
// matrix descriptors.
#pragma once
#include "matrix_operands.h"

namespace emu {

// PTX ISA, tcgen05: Instruction descriptor, for .kind::f16 and .kind::tf32
struct MmaShape {
  Element a, b;
  bool half_d;  // D is fp16, else fp32
  bool negate_a, negate_b, mn_major_a, mn_major_b;
  u32 m, n, k;
};
MmaShape unpack_instruction(Cta&, Warp&, const Op&, bool tf32, u32 bits);

// PTX ISA, tcgen05: Shared memory descriptor
OperandLayout unpack_matrix(Cta&, Warp&, const Op&, u64 bits, bool tf32, bool mn_major, const char* name);

}  // namespace emu
