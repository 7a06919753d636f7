// A parsed kernel: operations in a row, whose registers are offsets in the register file of a warp.
#pragma once
#include <map>
#include <new>
#include <type_traits>
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;

// Executes an operation for the lanes in `mask`.
using Handler = void (*)(Cta&, Warp&, const Op&, u32 mask);

// Kinds of operations for the loop over a warp's instructions; all but Compute change more than registers and memory.
enum class Kind : u8 { Compute, Branch, BranchIndexed, Exit, Barrier, MbarrierWait, SetRegisters, Trap };

// The lanes that execute an operation together: any, all that have not ended (.aligned), or those of a member mask.
enum class Together : u8 { Any, All, Members };

// [base + offset], with the base a register of 32 or 64 bits
struct Address {
  u32 base = NONE;
  bool wide = true;
  s64 offset = 0;
};

// A register of a list: where it is and how wide
struct Slot {
  u32 offset;
  u32 bits;
};

struct Op {
  Handler fn = nullptr;
  u32 guard = NONE;  // predicate
  bool guard_negated = false;
  Kind kind = Kind::Compute;
  Together together = Together::Any;
  bool meets_in_flight = false;  // may name registers that asynchronous instructions use
  u32 d[2] = {NONE, NONE};       // destinations
  u32 s[4] = {NONE, NONE, NONE, NONE};
  u32 members = NONE;  // register with the member mask
  s32 target = -1;     // of a branch: a pc, or the index of a table of them
  s64 imm = 0;
  Address address[4];
  std::vector<Slot> list;    // vectors of registers
  std::vector<u32> touched;  // offsets of all registers that it names
  std::vector<u32> writes;   // written registers that are operands of a wgmma
  int line = 0, number = 0;  // in the PTX text, among the operations

  // Modifiers of a family of instructions, as a struct of that family.
  template <class Options>
  Options& set() {
    static_assert(std::is_trivially_copyable_v<Options> && sizeof(Options) <= sizeof options_);
    return *new (options_) Options{};
  }
  template <class Options>
  const Options& get() const {
    return *std::launder(reinterpret_cast<const Options*>(options_));
  }

 private:
  alignas(8) u8 options_[16] = {};
};

struct Param {
  u32 size, offset;
};

struct Program {
  std::string name;
  std::vector<Op> ops;
  std::vector<std::string> text;  // of every operation, for messages
  std::vector<std::vector<s32>> branch_tables;
  std::vector<Param> params;
  u32 param_bytes = 0;
  u32 register_bytes = 0;                                   // of a warp, with its constants and special registers
  std::vector<u8> initial;                                  // register file at the start, with the constants
  std::map<std::string, u32> special;                       // offsets of the special registers that are used
  std::vector<std::pair<u32, std::string>> register_names;  // by offset
  int reqntid = 0, maxnreg = 0;
  bool uses_tensor_memory = false;

  std::string register_name(u32 offset) const;
};

Program* parse(const char* text);

}  // namespace emu
