// Messages that say where a kernel did something wrong: the PTX line, the CTA and the warp.
#pragma once
#include "machine.h"

namespace emu {

std::string where(const Cta&, const Warp&, const Op&);
[[noreturn]] void fail_at(const Cta&, const Warp&, const Op&, int lane, const std::string& text);
[[noreturn]] void fail_deadlock(const Cta&, const char* why);

}  // namespace emu
