// Fences between the generic and the async proxy in shared memory (PTX ISA, Memory Consistency Model: Proxies): what
// threads have written and not yet made visible to TMA and wgmma. Other fences order nothing here: memory is coherent.
#pragma once
#include <vector>

#include "races.h"

namespace emu {

struct Instruction;
class Decoder;

struct ProxyState {
  static constexpr u32 GRANULE = 16;
  struct Unfenced {
    u16 writer = NOBODY;
    u32 clock = 0;
  };
  std::vector<Unfenced> unfenced;  // by granule
};

void decode_fence(Decoder&, Instruction&);

// A write through the generic proxy
void generic_write(Cta&, u32 address, u32 size, Agent writer);
// An access through the async proxy, by an instruction of this warp
void async_access(Cta&, Warp&, const Op&, u32 address, u32 size, Access);

}  // namespace emu
