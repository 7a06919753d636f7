// fence.proxy.async and fence.mbarrier_init; other fences and membars do nothing.
#include "fences.h"

#include <algorithm>

#include "decoder.h"
#include "lanes.h"
#include "messages.h"

namespace emu {

namespace {

// PTX ISA, membar/fence: a proxy fence orders what its thread has done, and what it is ordered after.
void fence_proxy_async(Cta& cta, Warp& w, const Op&, u32) {
  if (!cta.races.on) return;
  const auto& known = cta.races.known[size_t(w.id)];
  for (auto& granule : cta.proxy.unfenced)
    if (granule.writer != NOBODY && granule.clock <= known[granule.writer]) granule.writer = NOBODY;
  fence_mbarrier_inits(cta, w);
}
void fence_mbarrier_init(Cta& cta, Warp& w, const Op&, u32) { fence_mbarrier_inits(cta, w); }

template <class F>
void for_granules(ProxyState& proxy, u32 address, u32 size, F f) {
  u32 last = (address - SHARED_BASE + size - 1) / ProxyState::GRANULE;
  for (u32 g = (address - SHARED_BASE) / ProxyState::GRANULE; g <= last; g++) f(proxy.unfenced[g], g);
}

}  // namespace

void decode_fence(Decoder& d, Instruction& i) {
  static const char* kinds[] = {"sc", "acq_rel", "acquire", "release", "proxy", "mbarrier_init", "cta", "gl", "sys"};
  static const char* proxies[] = {"alias", "async", "tensormap::generic"};
  auto is = [](const std::string& word, const auto& names) {
    return std::find(std::begin(names), std::end(names), word) != std::end(names);
  };
  if (!is(i.word(1), kinds) || (i.word(1) == "proxy" && !is(i.word(2), proxies))) d.bad("fence");
  i.op.fn = nothing;
  if (i.word(1) == "proxy" && i.word(2) == "async" && !i.has("global")) i.op.fn = fence_proxy_async;
  if (i.word(1) == "mbarrier_init") i.op.fn = fence_mbarrier_init;
}

void generic_write(Cta& cta, u32 address, u32 size, Agent writer) {
  if (!cta.races.on) return;
  for_granules(cta.proxy, address, size,
               [&](ProxyState::Unfenced& granule, u32) { granule = {u16(writer.id), writer.clock}; });
}

void async_access(Cta& cta, Warp& w, const Op& o, u32 address, u32 size, Access access) {
  if (!cta.races.on) return;
  for_granules(cta.proxy, address, size, [&](ProxyState::Unfenced& granule, u32 g) {
    if (granule.writer == NOBODY) return;
    bool write = access == Access::Write;
    cta.launch->note(format(
        "%s: the async proxy %s shared memory that was written without fence.proxy.async since: %s, offset %u, by %s",
        write ? "PROXY (write)" : "PROXY", write ? "writes" : "reads", where(cta, w, o).c_str(),
        g * ProxyState::GRANULE, agent_name(cta, granule.writer).c_str()));
    granule.writer = NOBODY;
  });
}

}  // namespace emu
