// The family of tcgen05 (sm_100, one CTA): its instructions by what they do.
#pragma once
#include "decoder.h"
#include "lanes.h"
#include "tensor_memory.h"

namespace emu {

void decode_tensor_allocation(Decoder&, Instruction&);  // alloc, dealloc, relinquish_alloc_permit
void decode_tensor_move(Decoder&, Instruction&);        // ld, st
void decode_tensor_wait(Decoder&, Instruction&);        // wait::ld, wait::st
void decode_tensor_mma(Decoder&, Instruction&);
void decode_tensor_copy(Decoder&, Instruction&);  // cp
void decode_tensor_commit(Decoder&, Instruction&);

// Refuses words of the name, from the third on, that are none of these.
void allow_words(Decoder&, const Instruction&, std::initializer_list<const char*> words);
// An operand that all lanes must agree on
u32 uniform(Cta&, Warp&, const Op&, u32 mask, const u64* values, const char* what);

}  // namespace emu
