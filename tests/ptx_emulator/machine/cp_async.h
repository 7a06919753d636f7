// cp.async: copies of threads from global to shared memory, in groups or tracked by an mbarrier. They are counted by
// warp: all lanes commit and wait together.
#pragma once
#include <deque>
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;
struct Instruction;
class Decoder;

struct CpAsyncCopy {
  u32 mask = 0;     // lanes whose copy has not been done
  u32 tracked = 0;  // lanes whose copy an mbarrier tracks
  u32 epoch = 0;
  u32 size = 0, source_size[32];
  u32 destination[32];
  u64 source[32];
  int op = 0;
};

struct CpAsyncGroup {
  std::vector<CpAsyncCopy> copies;
  u32 epoch;
};

struct CpAsyncState {
  std::vector<CpAsyncCopy> open;  // not committed
  std::deque<CpAsyncGroup> groups;
  u32 epoch = 1;  // of copies that are issued now; a commit, or a wait for all copies, starts the next
};

void decode_cp_async(Decoder&, Instruction&);
void end_cp_async(Cta&, Warp&);

}  // namespace emu
