// Operands of an instruction: registers, constants, vectors, addresses, labels.
#include "decoder.h"

#include <algorithm>
#include <cstdlib>

#include "families.h"
#include "lanes.h"
#include "numbers.h"
#include "special_registers.h"

namespace emu {

const std::string& Instruction::word(size_t k) const {
  static const std::string none;
  return k < words.size() ? words[k] : none;
}
bool Instruction::has(const char* word) const { return std::find(words.begin(), words.end(), word) != words.end(); }
std::vector<Type> Instruction::types() const {
  std::vector<Type> found;
  for (size_t k = 1; k < words.size(); k++)
    if (Type t = type_named(words[k]); t != Type::None) found.push_back(t);
  return found;
}

void Decoder::bad(const std::string& why) const {
  throw Error{format("PTX line %d: %s: %s", line, why.c_str(), statement.c_str())};
}

// Wide registers start at cache lines; a predicate is a mask of 32 bits.
u32 Decoder::allocate(int bits) {
  u32 bytes = bits == 1 ? 4 : u32(bits) / 8 * LANES;
  if (bytes >= 64) program.register_bytes = (program.register_bytes + 63) / 64 * 64;
  u32 offset = program.register_bytes;
  program.register_bytes += bytes;
  program.initial.resize(program.register_bytes, 0xcd);
  return offset;
}

u32 Decoder::constant(u64 value, int bits) {
  if (bits == 1) value = value ? ALL_LANES : 0;
  auto [entry, is_new] = constants_.try_emplace({bits, value}, NONE);
  if (!is_new) return entry->second;
  u32 at = entry->second = allocate(bits);
  if (bits == 1) memcpy(&program.initial[at], &value, 4);
  else
    for (u32 i = 0; i < LANES; i++) memcpy(&program.initial[at + i * u32(bits) / 8], &value, size_t(bits) / 8);
  return at;
}

const Register* Decoder::find(const std::string& name) {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    auto found = scope->registers.find(name);
    if (found != scope->registers.end()) return &found->second;
    size_t digits = name.find_last_not_of("0123456789") + 1;
    if (digits == name.size()) continue;
    auto range = scope->ranges.find(name.substr(0, digits));
    if (range == scope->ranges.end() || atoi(name.c_str() + digits) >= range->second.second) continue;
    int bits = bits_of(range->second.first);
    Register r{allocate(bits), bits};
    program.register_names.push_back({r.offset, name});
    return &(scope->registers[name] = r);
  }
  int bits = special_register_bits(name);
  if (!bits) return nullptr;
  Register r{allocate(bits), bits};
  program.special[name] = r.offset;
  return &(scopes[0].registers[name] = r);
}

void Decoder::operand_number(Operand& o, const std::string& s) const {
  o.kind = Operand::Kind::Constant;
  char form = s.size() > 2 && s[0] == '0' ? char(tolower(s[1])) : ' ';
  if (form == 'f' || form == 'd') {  // PTX ISA, Floating-Point Constants: the bits of an fp32 or an fp64
    o.float_bits = form == 'f' ? 32 : 64;
    o.value = s64(strtoull(s.c_str() + 2, nullptr, 16));
  } else {
    o.value = s[0] == '-' ? strtoll(s.c_str(), nullptr, 0) : s64(strtoull(s.c_str(), nullptr, 0));
  }
}

void Decoder::operand_address(Operand& o, const std::string& inside) {  // base+offset, {coordinates}
  o.kind = Operand::Kind::Address;
  auto parts = split(inside, ',');
  std::string base = parts[0];
  size_t plus = base.find('+', 1);
  if (plus != std::string::npos) {
    o.value = strtoll(trimmed(base.substr(plus + 1)).c_str(), nullptr, 0);
    base = trimmed(base.substr(0, plus));
  }
  o.parts.push_back(operand(base));
  for (size_t k = 1; k < parts.size(); k++) o.parts.push_back(operand(parts[k]));
}

Operand Decoder::operand(std::string s) {
  s = trimmed(s);
  if (s.empty()) bad("empty operand");
  Operand o;
  if (s[0] == '!') {
    o = operand(s.substr(1));
    o.negated = true;
  } else if (s[0] == '{') {
    o.kind = Operand::Kind::Vector;
    for (auto& part : split(s.substr(1, s.rfind('}') - 1), ',')) o.parts.push_back(operand(part));
  } else if (s[0] == '[') {
    operand_address(o, s.substr(1, s.rfind(']') - 1));
  } else if (size_t bar = s.find('|'); bar != std::string::npos) {
    o = operand(s.substr(0, bar));
    o.second = operand(s.substr(bar + 1)).reg;
  } else if (s == "_") {
    o.kind = Operand::Kind::Sink;
  } else if (isdigit((unsigned char)s[0]) || s[0] == '-') {
    operand_number(o, s);
  } else if (const Register* r = find(s)) {
    o.kind = Operand::Kind::Register;
    o.reg = *r;
  } else if (auto symbol = symbols.find(s); symbol != symbols.end()) {
    o.value = s64(symbol->second);
  } else {
    if (s[0] == '%') bad("unknown register " + s);
    o.kind = Operand::Kind::Label;
    o.label = s;
  }
  return o;
}

u32 Decoder::source(const Operand& o, int bits) {
  if (o.is(Operand::Kind::Register)) {
    if (o.reg.bits != bits) bad(format("operand of %d bits, expected %d", o.reg.bits, bits));
    return o.reg.offset;
  }
  if (!o.is(Operand::Kind::Constant)) bad("expected a register or a constant");
  u64 value = u64(o.value);
  if (o.float_bits == 64 && bits == 32) {
    double wide;
    memcpy(&wide, &value, 8);
    value = to_bits(float(wide));
  }
  if (bits < 64 && bits > 1) value &= (1ull << bits) - 1;
  return constant(value, bits);
}

u32 Decoder::destination(const Operand& o, int bits) {
  if (o.is(Operand::Kind::Sink)) return allocate(bits);
  if (!o.is(Operand::Kind::Register)) bad("expected a register to write");
  if (o.reg.bits != bits) bad(format("destination of %d bits, expected %d", o.reg.bits, bits));
  return o.reg.offset;
}

u32 Decoder::second_destination(const Operand& o) const { return o.second.offset; }

Slot Decoder::source_slot(const Operand& o, int bits) { return {source(o, bits), u32(bits)}; }
Slot Decoder::destination_slot(const Operand& o, int bits) { return {destination(o, bits), u32(bits)}; }

Address Decoder::address(const Operand& o) {
  if (!o.is(Operand::Kind::Address)) bad("expected an address");
  const Operand& base = o.parts[0];
  if (base.is(Operand::Kind::Constant)) return {constant(u64(base.value), 64), true, o.value};
  if (!base.is(Operand::Kind::Register)) bad("address base");
  if (base.reg.bits != 32 && base.reg.bits != 64) bad("address register");
  return {base.reg.offset, base.reg.bits == 64, o.value};
}

void Decoder::expect(const Instruction& i, size_t operands) const {
  if (i.operands.size() != operands) bad(format("expected %zu operands", operands));
}
void Decoder::unary(Instruction& i, int bits, Handler fn) {
  expect(i, 2);
  i.op.d[0] = destination(i.operands[0], bits), i.op.s[0] = source(i.operands[1], bits), i.op.fn = fn;
}
void Decoder::binary(Instruction& i, int bits, Handler fn) {
  expect(i, 3);
  i.op.d[0] = destination(i.operands[0], bits), i.op.fn = fn;
  for (size_t k = 0; k < 2; k++) i.op.s[k] = source(i.operands[k + 1], bits);
}
void Decoder::ternary(Instruction& i, int bits, Handler fn) {
  expect(i, 4);
  i.op.d[0] = destination(i.operands[0], bits), i.op.fn = fn;
  for (size_t k = 0; k < 3; k++) i.op.s[k] = source(i.operands[k + 1], bits);
}

void Decoder::declare(const std::string& s) {  // ".reg .b32 %r<300>, a"
  size_t from = s.find_first_not_of(" \t", 4), to = s.find_first_of(" \t", from);
  Type type = type_named(s.substr(from + 1, to - from - 1));
  if (type == Type::None) bad("register type");
  Scope& scope = scopes.back();
  for (auto& name : split(s.substr(to), ',')) {
    size_t angle = name.find('<');
    if (angle != std::string::npos) {
      scope.ranges[trimmed(name.substr(0, angle))] = {type, atoi(name.c_str() + angle + 1)};
    } else {
      Register r{allocate(bits_of(type)), bits_of(type)};
      scope.registers[name] = r;
      program.register_names.push_back({r.offset, name});
    }
  }
}

void Decoder::touch(std::vector<u32>& offsets, const Operand& o) const {
  if (o.is(Operand::Kind::Register)) offsets.push_back(o.reg.offset);
  if (o.second.offset != NONE) offsets.push_back(o.second.offset);
  for (auto& part : o.parts) touch(offsets, part);
}

Space space_of(const Instruction& i) {
  Space space = Space::Generic;
  for (auto& word : i.words) {
    if (word == "global") space = Space::Global;
    if (word == "shared" || word == "shared::cta") space = Space::Shared;
    if (word == "param" || word == "param::entry") space = Space::Param;
    if (word == "local") space = Space::Local;
  }
  return space;
}

void Decoder::instruction(const std::string& whole) {
  Instruction i;
  Op& op = i.op;
  std::string s = whole;
  op.line = line, op.number = int(program.ops.size());
  if (s[0] == '@') {
    size_t end = s.find_first_of(" \t");
    std::string guard = s.substr(1, end - 1);
    if (guard[0] == '!') op.guard_negated = true, guard = guard.substr(1);
    const Register* r = find(guard);
    if (!r || r->bits != 1) bad("guard");
    op.guard = r->offset;
    s = trimmed(s.substr(end));
  }
  size_t end = s.find_first_of(" \t\n");
  i.words = split(s.substr(0, end), '.');
  if (end != std::string::npos)
    for (auto& text : split(trimmed(s.substr(end)), ','))
      if (!text.empty()) i.operands.push_back(operand(text));
  for (auto& o : i.operands) touch(op.touched, o);
  if (auto types = i.types(); !types.empty()) i.type = types.back();

  // A CTA's own shared memory lies in the window of its cluster: copies, mbarriers and fences may name it so.
  bool may_name_cluster = i.name() == "cp" || i.name() == "mbarrier" || i.name() == "fence" || i.name() == "tcgen05";
  if ((i.has("shared::cluster") && !may_name_cluster) || i.has("multicast::cluster") || i.has("cta_group::2"))
    bad("clusters are not implemented");
  const Family* family = family_of(i.name());
  if (!family) bad("instruction not implemented");
  family->decode(*this, i);
  if (op.kind == Kind::Compute && !op.fn) bad("instruction not implemented");
  if (family->writes_first && !i.operands.empty()) touch(op.writes, i.operands[0]);
  if (op.guard != NONE) op.touched.push_back(op.guard);
  program.ops.push_back(op);
  program.text.push_back(statement);
}

}  // namespace emu
