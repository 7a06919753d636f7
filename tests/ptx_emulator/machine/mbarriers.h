// mbarriers: phases, arrivals, transaction counts (PTX ISA, Parallel Synchronization and Communication Instructions:
// mbarrier). Waits by parity only. Their state is kept beside shared memory: reading its 8 bytes gives nothing.
#pragma once
#include <map>
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;
struct Instruction;
class Decoder;

struct Mbarrier {
  u32 expected, pending;  // arrivals
  s64 transactions;       // bytes
  u64 phase;              // completed phases
  bool valid;
  // For the search for races
  int number;                    // among those of the CTA
  std::vector<u32> clock, done;  // known to those that arrived, in this phase and in the last completed one
  int init_warp;
  u32 init_clock;
  bool init_unfenced;     // its init has not been made visible to the async proxy
  std::vector<u32> used;  // by warp: its clock when it last used it
};

struct Mbarriers {
  std::map<u32, Mbarrier> at;  // by shared address
  int count = 0;
};

void decode_mbarrier(Decoder&, Instruction&);

// The mbarrier that an instruction names; notes uses that are not ordered after its init.
Mbarrier& use_mbarrier(Cta&, Warp&, const Op&, int lane, u32 address);
// The mbarrier that an asynchronous operation signals
Mbarrier& signalled_mbarrier(Cta&, Warp&, const Op&, u32 address, const char* what);
void arrive(Cta&, Warp&, const Op&, int lane, Mbarrier&, u32 count);
void expect_one_more(Cta&, Warp&, const Op&, int lane, Mbarrier&);
void complete_transactions(Cta&, Mbarrier&, s64 bytes);
bool wait_is_over(const Cta&, u32 address, u32 parity);
// PTX ISA, mbarrier.init: `w` makes visible the inits that it is ordered after.
void fence_mbarrier_inits(Cta&, const Warp& w);
// PROXY note if a TMA load uses an mbarrier whose init is not visible to it
void check_init_visible(Cta&, Warp&, const Op&, Mbarrier&);
void end_mbarriers(Cta&);

}  // namespace emu
