// Operands of wgmma in shared memory, as matrix descriptors say how they lie: K-major and MN-major, all swizzles.
#pragma once
#include "matrix_elements.h"
#include "tensor_maps.h"

namespace emu {

struct WgmmaOptions {
  u16 columns;
  Element element;
  bool a_in_registers;
  bool scale_d_negated, negate_a, negate_b;
  bool mn_major_a, mn_major_b;  // "transposed"
  int depth() const { return 32 / int(bytes_of(element)); }
};

// Part of an operand in shared memory: `count` rows of A or columns of B
struct Part {
  u64 descriptor;
  bool mn_major;
  u32 first, count;
};

// matrix[k * pitch + mn] of a part; mn counts from its first.
void read_part(Cta&, Warp&, const Op&, const Part&, float* matrix, u32 pitch);
// For the search for races: reads through the async proxy, at the time of the issue
void record_part(Cta&, Warp&, const Op&, const Part&);

}  // namespace emu
