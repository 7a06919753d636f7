// Instructions between the lanes of a warp: shfl, vote, match, redux, elect, activemask, bar.warp.
#include <algorithm>

#include "arithmetic.h"
#include "families.h"
#include "float_functions.h"
#include "messages.h"

namespace emu {

namespace {

enum class Shuffle : u8 { Up, Down, Butterfly, Index };
struct ShuffleOptions {
  Shuffle mode;
};
void shuffle(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const u32 *a = reg<u32>(w, o.s[0]), *b = reg<u32>(w, o.s[1]), *c = reg<u32>(w, o.s[2]);
  u32 result[LANES], valid = 0;
  for (int i = 0; i < LANES; i++) {  // PTX ISA, shfl.sync, whose names these are
    int bval = b[i] & 31, cval = c[i] & 31, segment = c[i] >> 8 & 31;
    int last = (i & segment) | (cval & ~segment), first = i & segment;
    int from = 0;
    bool inside = false;
    switch (o.get<ShuffleOptions>().mode) {
      case Shuffle::Up: from = i - bval, inside = from >= last; break;
      case Shuffle::Down: from = i + bval, inside = from <= last; break;
      case Shuffle::Butterfly: from = i ^ bval, inside = from <= last; break;
      case Shuffle::Index: from = first | (bval & ~segment), inside = from <= last; break;
    }
    if (!inside) from = i;
    valid |= u32(inside) << i;
    result[i] = a[from & 31];
    if (on(mask, i) && !on(mask, from & 31))
      fail_at(cta, w, o, i, format("shfl reads lane %d, which does not take part", from));
  }
  for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = result[i]; });
  if (o.d[1] != NONE) set_predicate(w, o.d[1], mask, valid);
}
void decode_shuffle(Decoder& d, Instruction& i) {
  static const std::map<std::string, Shuffle> modes = {
      {"up", Shuffle::Up}, {"down", Shuffle::Down}, {"bfly", Shuffle::Butterfly}, {"idx", Shuffle::Index}};
  auto mode = modes.find(i.word(2));
  if (mode == modes.end() || i.word(1) != "sync" || i.operands.size() != 5) d.bad("shfl");
  i.op.set<ShuffleOptions>().mode = mode->second;
  i.op.d[0] = d.destination(i.operands[0], 32), i.op.d[1] = d.second_destination(i.operands[0]);
  for (size_t k = 0; k < 3; k++) i.op.s[k] = d.source(i.operands[k + 1], 32);
  i.op.members = d.source(i.operands[4], 32);
  i.op.fn = shuffle;
}

void elect(Cta&, Warp& w, const Op& o, u32 mask) {
  u32 leader = u32(__builtin_ctz(mask));
  for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = leader; });
  if (o.d[1] != NONE) set_predicate(w, o.d[1], mask, 1u << leader);
}

enum class Vote : u8 { Ballot, Any, All, Uniform };
struct VoteOptions {
  Vote mode;
  bool negated;
};
void vote(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<VoteOptions>();
  const u32 p = predicate(w, o.s[0], options.negated) & mask;
  bool result = false;
  switch (options.mode) {
    case Vote::Ballot: return for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = p; });
    case Vote::Any: result = p != 0; break;
    case Vote::All: result = p == mask; break;
    case Vote::Uniform: result = p == 0 || p == mask; break;
  }
  set_predicate(w, o.d[0], mask, result ? ALL_LANES : 0);
}
void decode_vote(Decoder& d, Instruction& i) {
  static const std::map<std::string, Vote> modes = {
      {"ballot", Vote::Ballot}, {"any", Vote::Any}, {"all", Vote::All}, {"uni", Vote::Uniform}};
  auto mode = modes.find(i.word(2));
  if (mode == modes.end() || i.operands.size() != 3) d.bad("vote");
  i.op.set<VoteOptions>() = {mode->second, i.operands[1].negated};
  i.op.d[0] = d.destination(i.operands[0], mode->second == Vote::Ballot ? 32 : 1);
  i.op.s[0] = d.source(i.operands[1], 1);
  i.op.members = d.source(i.operands[2], 32);
  i.op.fn = vote;
}

void active_mask(Cta&, Warp& w, const Op& o, u32 mask) {
  for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = mask; });
}

struct MatchOptions {
  bool all;
  u8 bits;
};
void match(Cta&, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<MatchOptions>();
  auto value = [&](int i) { return read_unsigned(w, o.s[0], options.bits, i); };
  u32 alike[LANES] = {}, alike_all = mask;
  for_lanes(mask, [&](int i) {
    for_lanes(mask, [&](int j) { alike[i] |= u32(value(j) == value(i)) << j; });
    alike_all &= alike[i];
  });
  const bool same = alike_all == mask;
  for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = options.all ? (same ? mask : 0) : alike[i]; });
  if (o.d[1] != NONE) set_predicate(w, o.d[1], mask, same ? ALL_LANES : 0);
}
void decode_match(Decoder& d, Instruction& i) {
  d.expect(i, 3);
  const int bits = bits_of(i.type);
  i.op.set<MatchOptions>() = {i.word(1) == "all", u8(bits)};
  i.op.d[0] = d.destination(i.operands[0], 32), i.op.d[1] = d.second_destination(i.operands[0]);
  i.op.s[0] = d.source(i.operands[1], bits);
  i.op.members = d.source(i.operands[2], 32);
  i.op.fn = match;
}

struct Reducer {
  u32 (*combine)(u32, u32);
  bool absolute = false;  // of floats
};
void reduce(Cta&, Warp& w, const Op& o, u32 mask) {
  const u32* a = reg<u32>(w, o.s[0]);
  const auto& reducer = o.get<Reducer>();
  const u32 kept = reducer.absolute ? 0x7fffffff : 0xffffffff;
  const int first = __builtin_ctz(mask);
  u32 result = a[first] & kept;
  for_lanes(mask & ~(1u << first), [&](int i) { result = reducer.combine(result, a[i] & kept); });
  for_lanes(mask, [&](int i) { reg<u32>(w, o.d[0])[i] = result; });
}
template <class F>
u32 of_floats(u32 a, u32 b) {
  return to_bits(F::f(from_bits(a), from_bits(b)));
}
Reducer reducer_of_floats(Decoder& d, const Instruction& i) {
  const bool nan = i.has("NaN"), absolute = i.has("abs");
  if (i.word(2) == "min") return {nan ? of_floats<MinNan<float>> : of_floats<Min<float>>, absolute};
  if (i.word(2) == "max") return {nan ? of_floats<MaxNan<float>> : of_floats<Max<float>>, absolute};
  d.bad("redux");
}
Reducer reducer_of(Decoder& d, const Instruction& i) {
  static const std::map<std::pair<std::string, bool>, Reducer> reducers = {
      {{"add", false}, {[](u32 a, u32 b) { return a + b; }}},
      {{"add", true}, {[](u32 a, u32 b) { return a + b; }}},
      {{"min", false}, {[](u32 a, u32 b) { return std::min(a, b); }}},
      {{"min", true}, {[](u32 a, u32 b) { return u32(std::min(s32(a), s32(b))); }}},
      {{"max", false}, {[](u32 a, u32 b) { return std::max(a, b); }}},
      {{"max", true}, {[](u32 a, u32 b) { return u32(std::max(s32(a), s32(b))); }}},
      {{"and", false}, {[](u32 a, u32 b) { return a & b; }}},
      {{"or", false}, {[](u32 a, u32 b) { return a | b; }}},
      {{"xor", false}, {[](u32 a, u32 b) { return a ^ b; }}}};
  if (i.type == Type::F32) return reducer_of_floats(d, i);
  auto found = reducers.find({i.word(2), i.type == Type::S32});
  const bool is_integer = i.type == Type::U32 || i.type == Type::S32 || i.type == Type::B32;
  if (found == reducers.end() || !is_integer) d.bad("redux");
  return found->second;
}
void decode_reduce(Decoder& d, Instruction& i) {
  d.expect(i, 3);
  i.op.set<Reducer>() = reducer_of(d, i);
  i.op.d[0] = d.destination(i.operands[0], 32);
  i.op.s[0] = d.source(i.operands[1], 32);
  i.op.members = d.source(i.operands[2], 32);
  i.op.fn = reduce;
}

}  // namespace

void decode_warp_wide(Decoder& d, Instruction& i) {
  const std::string& name = i.name();
  i.op.together = Together::Members;
  if (name == "shfl") decode_shuffle(d, i);
  if (name == "vote") decode_vote(d, i);
  if (name == "match") decode_match(d, i);
  if (name == "redux") decode_reduce(d, i);
  if (name == "elect") {
    d.expect(i, 2);
    i.op.d[0] = d.destination(i.operands[0], 32), i.op.d[1] = d.second_destination(i.operands[0]);
    i.op.members = d.source(i.operands[1], 32), i.op.fn = elect;
  }
  if (name == "activemask") {
    d.expect(i, 1);
    i.op.d[0] = d.destination(i.operands[0], 32), i.op.fn = active_mask;
    i.op.together = Together::Any;
  }
  if (name == "bar" || name == "barrier") {  // bar.warp.sync
    d.expect(i, 1);
    i.op.members = d.source(i.operands[0], 32), i.op.fn = nothing;
  }
}

}  // namespace emu
