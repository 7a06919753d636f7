// The cost of memory accesses by their addresses: sectors of global memory, bank conflicts of shared memory.
#pragma once
#include "counters.h"
#include "lanes.h"

namespace emu {

// Sectors of 32 bytes that the lanes touch
int count_sectors(const Addresses&, u32 mask, u32 size);
// Counts the wavefronts of a shared access, and as `conflicts` those beyond one for each phase.
void count_wavefronts(Cta&, const Op&, const Addresses&, u32 mask, u32 size, Counter conflicts);
// The same for ldmatrix and stmatrix; the addresses are those of the rows of `matrices` matrices
void count_matrix_conflicts(Cta&, const Op&, const Addresses&, int matrices);

}  // namespace emu
