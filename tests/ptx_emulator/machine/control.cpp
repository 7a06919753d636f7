// Decoding of branches, the ends of threads and traps; warps.cpp executes them.
#include "families.h"

namespace emu {

void decode_control(Decoder& d, Instruction& i) {
  const std::string& name = i.name();
  Op& op = i.op;
  const size_t number = d.program.ops.size();
  if (name == "ret" || name == "exit") op.kind = Kind::Exit;
  if (name == "trap") op.kind = Kind::Trap;
  if (name == "bra") {
    if (i.operands.size() != 1 || !i.operands[0].is(Operand::Kind::Label)) d.bad("branch");
    op.kind = Kind::Branch;
    d.scopes.back().branches.push_back({number, i.operands[0].label});
  }
  if (name == "brx") {
    if (i.operands.size() != 2 || i.word(1) != "idx" || !d.branch_targets.count(i.operands[1].label)) d.bad("brx");
    op.kind = Kind::BranchIndexed;
    op.s[0] = d.source(i.operands[0], 32);
    d.indexed_branches.push_back({number, i.operands[1].label});
  }
}

}  // namespace emu
