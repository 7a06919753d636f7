// Checks of addresses: allocations of global memory, shared memory, parameters, alignment; and races between CTAs in
// global memory, which are accesses of one word by two CTAs in one launch, atomics and equal values apart.
#pragma once
#include "machine.h"

namespace emu {

enum class Space : u8 { Generic, Global, Shared, Param, Local };

// Unordered accesses of two CTAs may race; atomics do not
enum class Order { Unordered, Atomic };

void check_global(Cta&, Warp&, const Op&, int lane, u64 address, u32 size, Access, Order = Order::Unordered);
void check_shared(Cta&, Warp&, const Op&, int lane, u32 address, u32 size);
bool is_global(Launch&, u64 address, u64 size);

// The host's address of the bytes of an aligned access. Global memory that is to be written is saved in the journal.
u8* locate(Cta&, Warp&, const Op&, int lane, Space, u64 address, u32 size, Access, Order = Order::Unordered);

}  // namespace emu
