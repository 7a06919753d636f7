// Operands of matrix products in shared memory: K-major and MN-major, all swizzles. The descriptors of wgmma and of
// tcgen05.mma say the same about them in other bits.
#pragma once
#include "matrix_elements.h"
#include "tensor_maps.h"

namespace emu {

struct OperandLayout {
  u32 start, leading, stride;  // address and offsets in bytes
  Swizzle swizzle;
};

// Part of an operand: `count` rows of A or columns of B, from `first` on, and `depth` steps along k
struct Part {
  OperandLayout layout;
  Element element;
  bool mn_major;
  u32 first, count, depth;
};

// matrix[k * pitch + mn] of a part; mn counts from its first.
void read_part(Cta&, Warp&, const Op&, const Part&, float* matrix, u32 pitch);
// For the search for races: reads through the async proxy, at the time of the issue
void record_part(Cta&, Warp&, const Op&, const Part&, Agent by);

}  // namespace emu
