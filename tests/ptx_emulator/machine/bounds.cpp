// Checks of addresses, and of accesses of several CTAs to one word of global memory.
#include "bounds.h"

#include <algorithm>

#include "messages.h"

namespace emu {

namespace {

auto first_after(const std::vector<Allocation>& allocations, u64 address) {
  return std::upper_bound(allocations.begin(), allocations.end(), address,
                          [](u64 value, const Allocation& a) { return value < a.start; });
}

std::string nearest_allocation(const Launch& launch, u64 address, u32 size) {
  std::string near = "no allocation is near";
  const auto& all = launch.allocations;
  auto at = first_after(all, address);
  u64 distance = ~0ull;
  if (at != all.begin()) {
    auto before = at - 1;
    distance = address - before->end;
    near = format("%lld bytes past the end of an allocation of %llu bytes at 0x%llx",
                  (long long)(address + size - before->end), (unsigned long long)(before->end - before->start),
                  (unsigned long long)before->start);
  }
  if (at != all.end() && at->start - address < distance)
    near = format("%llu bytes before an allocation of %llu bytes at 0x%llx", (unsigned long long)(at->start - address),
                  (unsigned long long)(at->end - at->start), (unsigned long long)at->start);
  return near;
}

void look_for_global_races(Cta& cta, Warp& w, const Op& o, u64 address, u32 size, Access access) {
  Launch& launch = *cta.launch;
  const u64 me = 1 + cta.linear;
  const bool whole_word = size >= 4;  // narrower accesses of two CTAs may share a word
  for (u64 word = address / 4; word <= (address + size - 1) / 4; word++) {
    auto writer = launch.global_writers.find(word);
    if (writer != launch.global_writers.end() && writer->second != me && whole_word)
      launch.note(format("GLOBAL RACE: a CTA %s what another one wrote in the same launch: %s, the other: %llu",
                         access == Access::Write ? "writes" : "reads", where(cta, w, o).c_str(),
                         (unsigned long long)writer->second - 1));
    if (access == Access::Read) {
      launch.global_readers[word] = me;
      continue;
    }
    auto reader = launch.global_readers.find(word);
    if (reader != launch.global_readers.end() && reader->second != me && whole_word)
      launch.note(format("GLOBAL RACE: a CTA writes what another one read in the same launch: %s, the other: %llu",
                         where(cta, w, o).c_str(), (unsigned long long)reader->second - 1));
    launch.global_writers[word] = me;
  }
}

}  // namespace

bool is_global(Launch& launch, u64 address, u64 size) {
  const auto& all = launch.allocations;
  auto inside = [&](const Allocation& a) { return address >= a.start && address + size <= a.end; };
  if (launch.last_allocation < all.size() && inside(all[launch.last_allocation])) return true;
  auto at = first_after(all, address);
  if (at == all.begin()) return false;
  --at;
  launch.last_allocation = size_t(at - all.begin());
  return inside(*at);
}

void check_global(Cta& cta, Warp& w, const Op& o, int lane, u64 address, u32 size, Access access, Order order) {
  Launch& launch = *cta.launch;
  if (!is_global(launch, address, size))
    fail_at(cta, w, o, lane,
            format("global %s of %u bytes at 0x%llx is out of bounds: %s", access == Access::Write ? "store" : "load",
                   size, (unsigned long long)address, nearest_allocation(launch, address, size).c_str()));
  if (launch.config.global_races && order == Order::Unordered) look_for_global_races(cta, w, o, address, size, access);
}

void check_shared(Cta& cta, Warp& w, const Op& o, int lane, u32 address, u32 size) {
  if (address < SHARED_BASE || u64(address) + size > u64(SHARED_BASE) + cta.shared_bytes)
    fail_at(cta, w, o, lane,
            format("shared access of %u bytes at offset %lld is out of bounds (%u bytes)", size,
                   (long long)address - SHARED_BASE, cta.shared_bytes));
}

u8* locate(Cta& cta, Warp& w, const Op& o, int lane, Space space, u64 address, u32 size, Access access, Order order) {
  if (address % size)
    fail_at(cta, w, o, lane, format("misaligned access of %u bytes at 0x%llx", size, (unsigned long long)address));
  switch (space) {
    case Space::Global:
      check_global(cta, w, o, lane, address, size, access, order);
      if (access == Access::Write) cta.launch->before_write(address, size);
      return reinterpret_cast<u8*>(address);
    case Space::Shared: check_shared(cta, w, o, lane, u32(address), size); return cta.shared_at(u32(address));
    case Space::Param:
      if (access == Access::Write) fail_at(cta, w, o, lane, "store to parameters");
      if (address + size > cta.program->param_bytes) fail_at(cta, w, o, lane, "parameter out of bounds");
      return cta.launch->params + address;
    default: fail_at(cta, w, o, lane, "address space");
  }
}

}  // namespace emu
