// The table of instructions. Where a word means several families, the type or the next words choose.
#include "families.h"

#include <unordered_map>

#include "lanes.h"

namespace emu {

namespace {

void decode_arithmetic(Decoder& d, Instruction& i) { (is_float(i.type) ? decode_floats : decode_integers)(d, i); }
void decode_logic(Decoder& d, Instruction& i) { (i.type == Type::Pred ? decode_predicates : decode_integers)(d, i); }
void decode_bar(Decoder& d, Instruction& i) { (i.word(1) == "warp" ? decode_warp_wide : decode_barrier)(d, i); }
void decode_cp(Decoder& d, Instruction& i) {
  if (i.word(1) == "reduce") return decode_bulk_store(d, i);
  if (i.word(1) != "async") return;
  if (i.word(2) != "bulk") return decode_cp_async(d, i);
  if (i.word(3) == "commit_group" || i.word(3) == "wait_group") return decode_bulk_group(d, i);
  if (i.word(3) == "prefetch") i.op.fn = nothing;
  if (i.word(3) == "tensor") (i.has("mbarrier::complete_tx::bytes") ? decode_bulk_load : decode_bulk_store)(d, i);
}
// Hints, and waits for what is not modelled: time and other launches
void decode_hint(Decoder&, Instruction& i) { i.op.fn = nothing; }
void decode_clusters(Decoder& d, Instruction&) { d.bad("clusters are not implemented"); }

}  // namespace

const Family* family_of(const std::string& word) {
  static const Family arithmetic{decode_arithmetic}, floats{decode_floats}, logic{decode_logic}, bits{decode_bits},
      moves{decode_move}, warp_wide{decode_warp_wide}, control{decode_control, false}, hint{decode_hint, false},
      bar{decode_bar, false}, fence{decode_fence, false}, clusters{decode_clusters};
  // clang-format off
  static const std::unordered_map<std::string, Family> table = {
      {"add", arithmetic}, {"sub", arithmetic}, {"mul", arithmetic}, {"mad", arithmetic}, {"div", arithmetic},
      {"rem", arithmetic}, {"min", arithmetic}, {"max", arithmetic}, {"neg", arithmetic}, {"abs", arithmetic},
      {"fma", floats}, {"copysign", floats}, {"ex2", floats}, {"lg2", floats}, {"rcp", floats}, {"sqrt", floats},
      {"rsqrt", floats}, {"sin", floats}, {"cos", floats}, {"tanh", floats},
      {"and", logic}, {"or", logic}, {"xor", logic}, {"not", logic},
      {"shl", bits}, {"shr", bits}, {"shf", bits}, {"lop3", bits}, {"bfe", bits}, {"bfi", bits}, {"popc", bits},
      {"clz", bits}, {"bfind", bits}, {"brev", bits}, {"prmt", bits},
      {"cvt", {decode_conversion}}, {"setp", {decode_comparison}}, {"selp", {decode_comparison}},
      {"mov", moves}, {"cvta", moves}, {"createpolicy", moves},
      {"shfl", warp_wide}, {"vote", warp_wide}, {"match", warp_wide}, {"redux", warp_wide}, {"elect", warp_wide},
      {"activemask", warp_wide},
      {"bra", control}, {"brx", control}, {"ret", control}, {"exit", control}, {"trap", control},
      {"bar", bar}, {"barrier", bar},
      {"setmaxnreg", {decode_setmaxnreg, false}}, {"ld", {decode_load_store}}, {"ldu", {decode_load_store}},
      {"st", {decode_load_store, false}}, {"atom", {decode_atomic}}, {"red", {decode_atomic, false}},
      {"ldmatrix", {decode_matrix_load_store}}, {"stmatrix", {decode_matrix_load_store, false}},
      {"cp", {decode_cp, false}}, {"mbarrier", {decode_mbarrier, false}}, {"tensormap", {decode_tensor_map, false}},
      {"fence", fence}, {"membar", fence},
      {"mma", {decode_mma}}, {"wgmma", {decode_wgmma, false}}, {"tcgen05", {decode_tcgen05, false}},
      {"mapa", clusters}, {"getctarank", clusters}, {"clusterlaunchcontrol", clusters},
      {"nanosleep", hint}, {"griddepcontrol", hint}, {"pmevent", hint}, {"nop", hint}, {"prefetch", hint},
      {"prefetchu", hint}, {"discard", hint}, {"applypriority", hint},
  };
  // clang-format on
  auto found = table.find(word);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace emu
