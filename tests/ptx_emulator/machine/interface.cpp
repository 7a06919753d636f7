// The C interface. Strings are UTF-8 and zero-terminated; a message is cut to the size of its buffer.
#include <cstdio>

#include "schedule.h"
#include "tensor_maps.h"

using namespace emu;

namespace {

constexpr int CONFIG_FIELDS = 13;

struct Request {
  const Program* program;
  const u32* grid;
  int threads;
  u32 shared;
  const u8* params;
  u32 param_bytes;
  const u64* allocations;
  int allocation_count;
};

void put(char* to, int size, const std::string& text) { snprintf(to, size_t(size), "%s", text.c_str()); }

Config config_of(const s64* row) {
  Config c;
  c.mode = Mode(row[0]), c.seed = int(row[1]), c.resident = int(row[2]), c.quantum = int(row[3]);
  c.random_schedule = row[4], c.race_granule = int(row[5]), c.global_races = row[6], c.trace = row[7];
  c.step_budget = u64(row[8]);
  c.wide_sums = {int(row[9]), int(row[10])}, c.narrow_sums = {int(row[11]), int(row[12])};
  return c;
}

std::unique_ptr<Launch> new_launch(const Request& r, const Config& config, Journal* journal) {
  constexpr u64 ALIGN = 64;  // of tensor maps among the parameters
  auto launch = std::make_unique<Launch>();
  launch->program = r.program, launch->config = config, launch->journal = journal;
  launch->op_count.assign(r.program->ops.size(), 0);
  launch->op_conflicts.assign(r.program->ops.size(), 0);
  for (int i = 0; i < 3; i++) launch->grid[i] = r.grid[i];
  launch->threads = u32(r.threads), launch->warps = u32(r.threads) / 32, launch->shared = r.shared;
  launch->params_storage.assign(r.param_bytes + ALIGN, 0);
  launch->params = launch->params_storage.data() + (ALIGN - u64(launch->params_storage.data()) % ALIGN) % ALIGN;
  memcpy(launch->params, r.params, r.param_bytes);
  for (int i = 0; i < r.allocation_count; i++)
    launch->allocations.push_back({r.allocations[2 * i], r.allocations[2 * i + 1]});
  return launch;
}

// The error of an order of execution, or empty; and its notes
std::string run_order(Launch& launch, const std::string& name, std::string& notes) {
  std::string error;
  try {
    if (launch.threads % 32 || launch.warps < 1 || launch.warps > MAX_WARPS) fail("threads: not 1...32 whole warps");
    run(launch);
  } catch (const Error& e) {
    error = name + ": " + e.text;
  } catch (const std::exception& e) {
    error = name + ": " + e.what();
  }
  for (auto& note : launch.notes) {
    int count = launch.count_of(note);
    notes += name + ": " + note + (count > 1 ? format(" (%d times)", count) : "") + "\n";
  }
  return error;
}

void put_counts(const Launch& launch, u64* counters, u64* per_op) {
  for (int i = 0; i < C_COUNT; i++) counters[i] = launch.counters[i];
  for (size_t i = 0; per_op && i < launch.op_count.size(); i++) {
    per_op[3 * i] = u64(launch.program->ops[i].line);
    per_op[3 * i + 1] = launch.op_count[i];
    per_op[3 * i + 2] = launch.op_conflicts[i];
  }
}

}  // namespace

extern "C" {

// A program, or null and a message.
void* emu_parse(const char* text, char* message, int size) {
  try {
    return parse(text);
  } catch (const Error& e) {
    put(message, size, e.text);
  } catch (const std::exception& e) {
    put(message, size, e.what());
  }
  return nullptr;
}

int emu_params(void* program, u32* sizes, u32* offsets, int most) {
  const auto& params = static_cast<Program*>(program)->params;
  for (int i = 0; i < int(params.size()) && i < most; i++)
    sizes[i] = params[size_t(i)].size, offsets[i] = params[size_t(i)].offset;
  return int(params.size());
}
u32 emu_param_bytes(void* program) { return static_cast<Program*>(program)->param_bytes; }
int emu_reqntid(void* program) { return static_cast<Program*>(program)->reqntid; }
int emu_ops(void* program) { return int(static_cast<Program*>(program)->ops.size()); }
int emu_counter_count() { return C_COUNT; }
const char* emu_counter_name(int i) { return COUNTER_NAMES[i]; }

// Runs a launch in `orders` orders of execution, each from the same state of global memory, and leaves that of the
// last one. Returns 0, or 1 if an order failed or if memory differs after two of them.
//
// allocations: pairs of start and end, sorted. configs: for each order mode (0 early, 1 late, 2 random), seed, resident
// CTAs, quantum, random schedule, granule of the search for races in bytes (0: none), races in global memory, trace,
// budget of steps, bits of terms and sums of wide operands and of narrow ones (`SumBits`). counters and per_op (for
// each operation its PTX line, executions, and conflicts) are of the first order. The message has a line for each note,
// `order: note`, and before them one for the error, `ERROR order: text`.
int emu_run(void* program, const u32* grid, int threads, u32 shared, const u8* params, u32 param_bytes,
            const u64* allocations, int allocation_count, const s64* configs, int orders, u64* counters, u64* per_op,
            char* message, int size) {
  const Request request{
      static_cast<Program*>(program), grid, threads, shared, params, param_bytes, allocations, allocation_count};
  std::string error, notes, first_name;
  Journal first;
  for (int k = 0; k < orders && error.empty(); k++) {
    const Config config = config_of(configs + CONFIG_FIELDS * k);
    Journal later, &journal = k ? later : first;
    auto launch = new_launch(request, config, orders > 1 ? &journal : nullptr);
    error = run_order(*launch, config.name(), notes);
    if (!k) put_counts(*launch, counters, per_op), first_name = config.name();
    if (orders == 1 || !error.empty()) break;
    if (k + 1 < orders) journal.undo();
    else journal.finish();
    if (k) error = Journal::difference(first, first_name, journal, config.name());
  }
  put(message, size, (error.empty() ? "" : "ERROR " + error + "\n") + notes);
  return !error.empty();
}

// A tensor map in the 128 bytes of `out`; dims, strides (in bytes) and box from the innermost dimension on, swizzle and
// type as in cuTensorMapEncodeTiled. Returns 0, with a message if it is unusual, or 1 and what is wrong.
int emu_make_map(u8* out, u64 base, int rank, const u64* dims, const u64* strides, const u32* box, int swizzle,
                 int type, int item, int fill, char* message, int size) {
  TensorMap map;
  std::string note;
  const MapEncoding encoding{base, rank, dims, strides, box, swizzle, type, item, fill != 0};
  const std::string wrong = encoding.encode(map, note);
  put(message, size, wrong.empty() ? note : wrong);
  if (!wrong.empty()) return 1;
  memset(out, 0, TENSOR_MAP_BYTES);
  memcpy(out, &map, sizeof map);
  return 0;
}
}
