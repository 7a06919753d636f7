// A warp runs: its fragments are lanes at different instructions, of which the one with the smallest pc goes first, so
// that they meet where branches join. Independent progress of lanes of one warp is not modelled beyond that.
#pragma once
#include "machine.h"

namespace emu {

std::unique_ptr<Warp> new_warp(const Launch&, Cta&, int id);
// Runs a warp until it waits, ends, or has executed `quantum` instructions.
void run_warp(Cta&, Warp&, int quantum);
bool can_run(const Cta&, const Warp&);

}  // namespace emu
