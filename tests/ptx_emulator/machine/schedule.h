// The scheduler: it chooses the warp that runs, and the time when operations in flight take effect.
#pragma once
#include "machine.h"

namespace emu {

void run(Launch&);

}  // namespace emu
