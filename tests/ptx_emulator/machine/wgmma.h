// wgmma: matrix products of a warp group, with operands in shared memory or registers, computed by each warp for its
// own 16 rows of D. A warp's wgmmas are in flight until its wgmma.wait_group. Sums are in fp32, also those of 8-bit
// operands, of which Hopper keeps fewer bits.
#pragma once
#include <deque>
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Program;
struct Instruction;
class Decoder;

struct WgmmaPending {
  int op;
  u64 descriptor_a, descriptor_b;
  bool scale_d;
};

struct WgmmaState {
  std::vector<WgmmaPending> open;  // not committed
  std::deque<std::vector<WgmmaPending>> groups;
  u32 sequence = 0;         // groups committed
  std::vector<u8> written;  // by register offset / 64: written since the last wgmma.fence
};

void decode_wgmma(Decoder&, Instruction&);
void end_wgmma(Cta&, Warp&);
// Reduces the registers that operations write to operands of wgmmas, which wgmma.fence orders.
void keep_wgmma_operands(Program&);

}  // namespace emu
