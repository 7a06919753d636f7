// Values of special registers, which do not change while a warp runs.
#include "special_registers.h"

#include "lanes.h"

namespace emu {

namespace {

constexpr u32 MULTIPROCESSORS = 132;

struct Place {
  const Launch& launch;
  const Cta& cta;
  u32 warp, lane;
};
struct Special {
  int bits;
  u32 (*value)(const Place&);
};
const std::map<std::string, Special> registers = {
    {"%tid.x", {32, [](const Place& p) { return p.warp * 32 + p.lane; }}},
    {"%tid.y", {32, [](const Place&) { return 0u; }}},
    {"%tid.z", {32, [](const Place&) { return 0u; }}},
    {"%ntid.x", {32, [](const Place& p) { return p.launch.threads; }}},
    {"%ntid.y", {32, [](const Place&) { return 1u; }}},
    {"%ntid.z", {32, [](const Place&) { return 1u; }}},
    {"%ctaid.x", {32, [](const Place& p) { return p.cta.index[0]; }}},
    {"%ctaid.y", {32, [](const Place& p) { return p.cta.index[1]; }}},
    {"%ctaid.z", {32, [](const Place& p) { return p.cta.index[2]; }}},
    {"%nctaid.x", {32, [](const Place& p) { return p.launch.grid[0]; }}},
    {"%nctaid.y", {32, [](const Place& p) { return p.launch.grid[1]; }}},
    {"%nctaid.z", {32, [](const Place& p) { return p.launch.grid[2]; }}},
    {"%laneid", {32, [](const Place& p) { return p.lane; }}},
    {"%warpid", {32, [](const Place& p) { return p.warp; }}},
    {"%nsmid", {32, [](const Place&) { return MULTIPROCESSORS; }}},
    {"%smid", {32, [](const Place& p) { return u32(p.cta.linear % MULTIPROCESSORS); }}},
    {"%lanemask_lt", {32, [](const Place& p) { return (1u << p.lane) - 1; }}},
    {"%lanemask_le", {32, [](const Place& p) { return u32((2ull << p.lane) - 1); }}},
    {"%lanemask_gt", {32, [](const Place& p) { return ~u32((2ull << p.lane) - 1); }}},
    {"%lanemask_ge", {32, [](const Place& p) { return ~((1u << p.lane) - 1); }}},
    {"%lanemask_eq", {32, [](const Place& p) { return 1u << p.lane; }}},
    {"%dynamic_smem_size", {32, [](const Place& p) { return p.launch.shared; }}},
    {"%total_smem_size", {32, [](const Place& p) { return p.launch.shared; }}},
    {"%cluster_ctarank", {32, [](const Place&) { return 0u; }}},
    {"%cluster_ctaid.x", {32, [](const Place&) { return 0u; }}},
    {"%clusterid.x", {32, [](const Place& p) { return p.cta.index[0]; }}},
    {"%clock", {32, [](const Place&) { return 0u; }}},
    {"%clock64", {64, [](const Place&) { return 0u; }}},
    {"%globaltimer", {64, [](const Place&) { return 0u; }}},
};

}  // namespace

int special_register_bits(const std::string& name) {
  auto found = registers.find(name);
  return found == registers.end() ? 0 : found->second.bits;
}

void set_special_registers(const Launch& launch, const Cta& cta, Warp& w) {
  for (const auto& [name, offset] : cta.program->special) {
    const Special& special = registers.at(name);
    for (u32 lane = 0; lane < LANES; lane++)
      write_unsigned(w, offset, u32(special.bits), int(lane), special.value({launch, cta, u32(w.id), lane}));
  }
}

}  // namespace emu
