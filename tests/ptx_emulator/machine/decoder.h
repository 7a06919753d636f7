// Decoding of one instruction: names of registers and constants to offsets in the register file, checks of widths.
// Constants and special registers lie in the register file as well, so that handlers read all operands alike.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "bounds.h"
#include "program.h"
#include "types.h"

namespace emu {

struct Register {
  u32 offset = NONE;
  int bits = 0;
};

struct Operand {
  enum class Kind { Register, Constant, Vector, Address, Sink, Label };
  Kind kind = Kind::Constant;
  Register reg;
  Register second;       // of `p|q`
  bool negated = false;  // of `!p`
  s64 value = 0;         // of a constant (of a float its bits), or an address's offset
  int float_bits = 0;
  std::vector<Operand> parts;  // of a vector; of an address its base and coordinates
  std::string label;

  bool is(Kind k) const { return kind == k; }
  // The elements of a vector, or itself
  std::vector<Operand> elements() const { return is(Kind::Vector) ? parts : std::vector<Operand>{*this}; }
};

// An instruction while it is decoded
struct Instruction {
  std::vector<std::string> words;  // of its name, between the dots
  std::vector<Operand> operands;
  Type type = Type::None;  // the last in its name
  Op op;

  const std::string& name() const { return words[0]; }
  const std::string& word(size_t k) const;  // empty where there is none
  bool has(const char* word) const;
  std::vector<Type> types() const;  // all in its name
};

struct Scope {
  std::map<std::string, Register> registers;
  std::map<std::string, std::pair<Type, int>> ranges;  // `%r<300>`: prefix to type and count
  std::map<std::string, s32> labels;
  std::vector<std::pair<size_t, std::string>> branches;  // operations whose label has not been found
};

class Decoder {
 public:
  Program& program;
  std::vector<Scope> scopes{1};
  std::map<std::string, u64> symbols;                              // of shared memory and parameters
  std::map<std::string, std::vector<std::string>> branch_targets;  // by label
  std::vector<std::pair<size_t, std::string>> indexed_branches;    // operations, and the labels of their targets
  int line = 0;
  std::string statement;

  explicit Decoder(Program& p) : program(p) {}

  [[noreturn]] void bad(const std::string& why) const;

  void declare(const std::string& statement);      // .reg
  void instruction(const std::string& statement);  // appends it to the program

  // Offsets of operands of `bits` bits
  u32 source(const Operand&, int bits);
  u32 destination(const Operand&, int bits);
  u32 second_destination(const Operand&) const;  // of `p|q`, or NONE
  u32 constant(u64 value, int bits);
  u32 allocate(int bits);
  Address address(const Operand&);
  Slot source_slot(const Operand&, int bits);
  Slot destination_slot(const Operand&, int bits);

  // d = f(a), f(a, b), f(a, b, c) with operands of one width
  void unary(Instruction&, int bits, Handler);
  void binary(Instruction&, int bits, Handler);
  void ternary(Instruction&, int bits, Handler);
  void expect(const Instruction&, size_t operands) const;

 private:
  std::map<std::pair<int, u64>, u32> constants_;

  const Register* find(const std::string& name);
  Operand operand(std::string text);
  void operand_number(Operand&, const std::string& text) const;
  void operand_address(Operand&, const std::string& text);
  void touch(std::vector<u32>& offsets, const Operand&) const;
};

Space space_of(const Instruction&);

}  // namespace emu
