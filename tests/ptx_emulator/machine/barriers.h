// Named barriers of a CTA (bar.sync, barrier.sync, bar.arrive), and its pool of registers (setmaxnreg).
#pragma once
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;
struct Instruction;
class Decoder;

constexpr int BARRIERS = 16;

struct Barrier {
  u32 arrived = 0;         // threads
  u32 expected = 0;        // 0: all that have not ended
  std::vector<u32> clock;  // known to those that arrived
};

void decode_barrier(Decoder&, Instruction&);
void decode_setmaxnreg(Decoder&, Instruction&);

// A warp arrives, and waits (its state says so) if others are missing.
void arrive_at_barrier(Cta&, Warp&, const Op&);
// A warp has ended: barriers for all threads may be complete without it.
void barriers_without_ended(Cta&);
// False when the warp has to wait for registers of others.
bool set_registers(Cta&, Warp&, const Op&);
bool registers_ready(const Cta&, const Warp&);

}  // namespace emu
