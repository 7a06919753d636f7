// CTAs are resident a few at a time, in the order of their numbers. Operations in flight take effect when no warp
// can go on (late), or at random moments; so a launch cannot starve, and a deadlock is one whatever the schedule.
#include "schedule.h"

#include <algorithm>

#include "messages.h"
#include "warps.h"

namespace emu {

namespace {

std::unique_ptr<Cta> new_cta(Launch& launch, u64 linear) {
  constexpr u64 ALIGN = 1024;  // of shared memory: swizzle patterns depend on addresses
  auto cta = std::make_unique<Cta>();
  cta->launch = &launch, cta->program = launch.program, cta->linear = linear;
  cta->index[0] = u32(linear % launch.grid[0]);
  cta->index[1] = u32(linear / launch.grid[0] % launch.grid[1]);
  cta->index[2] = u32(linear / launch.grid[0] / launch.grid[1]);
  cta->shared_bytes = launch.shared;
  cta->shared_storage.assign(launch.shared + ALIGN, 0xff);
  cta->shared = cta->shared_storage.data() + (ALIGN - u64(cta->shared_storage.data()) % ALIGN) % ALIGN;
  for (u32 k = 0; k < launch.warps; k++) cta->warps.push_back(new_warp(launch, *cta, int(k)));
  start_races(*cta);
  return cta;
}

bool has_ended(const Cta& cta) {
  return std::all_of(cta.warps.begin(), cta.warps.end(), [](auto& w) { return w->state == Warp::State::Done; });
}

void end_cta(Cta& cta) {
  Launch& launch = *cta.launch;
  for (auto& operation : cta.in_flight.operations)
    launch.note(format("a CTA of %s ends with asynchronous operations on their way: %s", launch.program->name.c_str(),
                       operation->name()));
  while (cta.in_flight.complete_one(cta, false)) {}
  end_mbarriers(cta);
  for (auto& [type, state] : cta.family_states) state->end(cta);
}

int share(Launch& launch) {
  const Config& config = launch.config;
  if (!config.random_schedule) return config.quantum;
  return 1 + int(launch.random() % (launch.random() % 3 ? 40 : u32(config.quantum)));
}

// Makes some progress in a CTA that has not ended.
void advance(Launch& launch, Cta& cta) {
  const Config& config = launch.config;
  if (config.mode == Mode::Random)
    while (!cta.in_flight.operations.empty() && launch.random() % 4 == 0) cta.in_flight.complete_one(cta, true);
  const size_t n = cta.warps.size();
  const size_t first = config.random_schedule ? launch.random() % n : cta.next_warp;
  for (size_t i = 0; i < n; i++) {
    const size_t k = (first + i) % n;
    Warp& w = *cta.warps[k];
    if (!can_run(cta, w)) continue;
    run_warp(cta, w, share(launch));
    cta.next_warp = (k + 1) % n;
    return;
  }
  if (!cta.in_flight.complete_one(cta, config.random_schedule)) fail_deadlock(cta, "Deadlock");
}

}  // namespace

std::string Config::name() const {
  std::string text = mode == Mode::Early ? "early" : mode == Mode::Late ? "late" : "random";
  return mode == Mode::Random && seed ? format("%s (seed %d)", text.c_str(), seed) : text;
}

void run(Launch& launch) {
  const Config& config = launch.config;
  const u64 total = u64(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  u64 next = 0;
  std::vector<std::unique_ptr<Cta>> resident;
  launch.random.seed(u32(config.seed));
  while (next < total || !resident.empty()) {
    while (next < total && resident.size() < size_t(std::max(1, config.resident)))
      resident.push_back(new_cta(launch, next++));
    const size_t k = config.random_schedule ? launch.random() % resident.size() : 0;
    Cta& cta = *resident[k];
    advance(launch, cta);
    if (has_ended(cta)) {
      end_cta(cta);
      resident.erase(resident.begin() + long(k));
    } else if (!config.random_schedule) {
      std::rotate(resident.begin(), resident.begin() + 1, resident.end());
    }
  }
  for (auto& s : launch.late_writes) write_global(launch, s);
}

}  // namespace emu
