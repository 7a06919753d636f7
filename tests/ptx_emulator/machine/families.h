// The families of instructions: which of them decodes an instruction, by the first word of its name. A family is a file
// with the decoding and the handlers of its instructions.
#pragma once
#include "decoder.h"

namespace emu {

using Decode = void (*)(Decoder&, Instruction&);

struct Family {
  Decode decode;             // fills in the operation; leaves its handler empty if it does not know the instruction
  bool writes_first = true;  // the first operand is a destination
};
const Family* family_of(const std::string& word);

void decode_integers(Decoder&, Instruction&);
void decode_floats(Decoder&, Instruction&);
void decode_floats_sm100(Decoder&, Instruction&);
void decode_bits(Decoder&, Instruction&);
void decode_conversion(Decoder&, Instruction&);
void decode_comparison(Decoder&, Instruction&);
void decode_predicates(Decoder&, Instruction&);
void decode_move(Decoder&, Instruction&);
void decode_warp_wide(Decoder&, Instruction&);
void decode_control(Decoder&, Instruction&);
void decode_load_store(Decoder&, Instruction&);
void decode_atomic(Decoder&, Instruction&);
void decode_matrix_load_store(Decoder&, Instruction&);
void decode_tensor_map(Decoder&, Instruction&);
void decode_bulk_load(Decoder&, Instruction&);
// `[map, {coordinates}]` of a TMA instruction: the map is address 1, the coordinates are the list. Returns the rank.
u32 decode_tensor_operand(Decoder&, Instruction&, const Operand& tensor, const std::string& rank, u32 boxes = 1);
void decode_mma(Decoder&, Instruction&);
void decode_tcgen05(Decoder&, Instruction&);

}  // namespace emu
