// Which warp of which CTA runs, and when what is in flight takes effect.
#pragma once
#include "machine.h"

namespace emu {

void run(Launch&);

}  // namespace emu
