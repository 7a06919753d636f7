// Scale factors of tcgen05.mma.block_scale in tensor memory (PTX ISA, tcgen05: Block Scaling).
#pragma once
#include "tensor_memory.h"

namespace emu {

// .scale_vec::1X: one factor for 32 steps along K of each row of A or column of B. Those of 32 rows take a column, a
// lane for each, and every quarter of the lanes holds them all. The instruction says which byte of the words it uses.
struct ScaleFactors {
  TensorAddress at{0};
  u32 byte = 0, count = 0;  // of rows of A or columns of B

  u32 columns() const { return (count + 31) / 32; }
  float factor(TensorMemory& t, u32 quarter, u32 row) const {
    return UE8M0::load(u8(t.word(quarter * 32 + row % 32, at.column + row / 32) >> 8 * byte));
  }
  // Calls f(cell) for the factors in all quarters.
  template <class F>
  void for_cells(F f) const {
    for (u32 row = 0; row < count; row += TENSOR_CELL_LANES)
      for (u32 quarter = 0; quarter < TENSOR_LANES / 32; quarter++)
        f(tensor_cell(quarter * 32 + row % 32, at.column + row / 32));
  }
};

}  // namespace emu
