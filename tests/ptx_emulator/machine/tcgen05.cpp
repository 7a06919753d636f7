// tcgen05: the choice among its instructions; fences. The fences order nothing here: waits for an mbarrier, for loads
// or for stores do, and barriers of the CTA; whether a fence goes with these is not checked.
#include "tcgen05.h"

#include <algorithm>

#include "families.h"
#include "messages.h"

namespace emu {

void decode_tcgen05(Decoder& d, Instruction& i) {
  const std::string& what = i.word(1);
  d.program.uses_tensor_memory = true;
  if (what == "alloc" || what == "dealloc" || what == "relinquish_alloc_permit") return decode_tensor_allocation(d, i);
  if (what == "ld" || what == "st") return decode_tensor_move(d, i);
  if (what == "wait::ld" || what == "wait::st") return decode_tensor_wait(d, i);
  if (what == "mma") return decode_tensor_mma(d, i);
  if (what == "cp") return decode_tensor_copy(d, i);
  if (what == "commit") return decode_tensor_commit(d, i);
  if (what == "fence::before_thread_sync" || what == "fence::after_thread_sync") i.op.fn = nothing;
}

void allow_words(Decoder& d, const Instruction& i, std::initializer_list<const char*> words) {
  for (size_t k = 2; k < i.words.size(); k++)
    if (std::find(words.begin(), words.end(), i.words[k]) == words.end()) d.bad("not implemented: " + i.words[k]);
}

u32 uniform(Cta& cta, Warp& w, const Op& o, u32 mask, const u64* values, const char* what) {
  const u32 value = u32(values[__builtin_ctz(mask)]);
  for_lanes(mask, [&](int i) {
    if (u32(values[i]) != value) fail_at(cta, w, o, i, format("tcgen05: %s differs between lanes", what));
  });
  return value;
}

}  // namespace emu
