// Counters of a launch: instructions of warps, memory traffic, bank conflicts, work of the tensor cores.
#pragma once
#include "basics.h"

namespace emu {

enum Counter {
  C_INSTRUCTIONS,
  C_GLOBAL_LOADS,
  C_GLOBAL_STORES,
  C_GLOBAL_LOAD_SECTORS,
  C_GLOBAL_STORE_SECTORS,
  C_SHARED_ACCESSES,
  C_SHARED_WAVEFRONTS,
  C_SHARED_LOAD_CONFLICTS,
  C_SHARED_STORE_CONFLICTS,
  C_LDST_MATRIX,
  C_LDST_MATRIX_CONFLICTS,
  C_BAR_SYNC,
  C_MBAR_WAITS,
  C_MBAR_BLOCKED,
  C_MMA,
  C_WGMMA,
  C_WGMMA_MACS,
  C_MMA_MACS,
  C_TENSOR_MMA,
  C_TENSOR_MACS,
  C_TENSOR_LOADS,
  C_TENSOR_STORES,
  C_CP_ASYNC,
  C_CP_ASYNC_BYTES,
  C_TMA_LOADS,
  C_TMA_LOAD_BYTES,
  C_TMA_STORES,
  C_TMA_STORE_BYTES,
  C_TMA_REDUCES,
  C_TMA_OOB_BYTES,
  C_ATOMICS,
  C_DIVERGENT,
  C_COUNT
};

inline constexpr const char* COUNTER_NAMES[] = {
    "instructions",  // of warps, as all counts of instructions here
    "global_loads",
    "global_stores",
    "global_load_sectors",  // of 32 bytes
    "global_store_sectors",
    "shared_accesses",
    "shared_wavefronts",      // without conflicts one for each phase
    "shared_load_conflicts",  // wavefronts beyond that
    "shared_store_conflicts",
    "ldst_matrix",
    "ldst_matrix_conflicts",
    "bar_sync",
    "mbar_waits",
    "mbar_blocked",
    "mma",
    "wgmma",  // of warps, four for each instruction of a warp group
    "wgmma_macs",
    "mma_macs",
    "tcgen05_mma",
    "tcgen05_macs",
    "tcgen05_ld",
    "tcgen05_st",
    "cp_async",
    "cp_async_bytes",
    "tma_loads",
    "tma_load_bytes",
    "tma_stores",
    "tma_store_bytes",
    "tma_reduces",
    "tma_oob_bytes",  // of boxes, outside of their tensors
    "atomics",
    "divergent",  // issued while the warp was split
};
static_assert(sizeof COUNTER_NAMES / sizeof *COUNTER_NAMES == C_COUNT);

}  // namespace emu
