// Special registers (PTX ISA, Special Registers). Clocks read as zero: time is not modelled.
#pragma once
#include "machine.h"

namespace emu {

int special_register_bits(const std::string& name);  // 0 if there is no such register
void set_special_registers(const Launch&, const Cta&, Warp&);

}  // namespace emu
