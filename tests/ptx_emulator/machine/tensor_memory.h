// Tensor memory of a CTA of sm_100 (PTX ISA, tcgen05: Tensor Memory): 128 lanes of 512 columns of 32 bits. It has
// the allocations, unfinished writes, and the search for races, by cells: 16 lanes of a column.
#pragma once
#include <vector>

#include "machine.h"

namespace emu {

constexpr u32 TENSOR_LANES = 128, TENSOR_COLUMNS = 512, TENSOR_UNIT = 32;  // columns are allocated in units
constexpr u32 TENSOR_CELL_LANES = 16, TENSOR_CELLS = TENSOR_LANES / TENSOR_CELL_LANES * TENSOR_COLUMNS;
constexpr u32 TENSOR_NAN = 0xffffffff;  // the value of words that have not been written

struct TensorAddress {
  u32 lane, column;
  explicit TensorAddress(u32 bits) : lane(bits >> 16), column(bits & 0xffff) {}
};
inline u32 tensor_cell(u32 lane, u32 column) {
  return column * (TENSOR_LANES / TENSOR_CELL_LANES) + lane / TENSOR_CELL_LANES;
}

// A tcgen05.ld or st before its wait
struct TensorMove {
  int op;
  u32 address;
  std::vector<u32> values;  // of st, by register and lane
  std::vector<bool> lost;   // of ld, by cell: a write was unfinished when it was issued
};

struct TensorMemory : FamilyState {
  std::vector<u32> words;                        // by lane and column
  u32 owner[TENSOR_COLUMNS / TENSOR_UNIT] = {};  // by unit: 0 if it is free, else 1 + first column of the allocation
  u32 size[TENSOR_COLUMNS / TENSOR_UNIT] = {};   // of the allocation that starts there
  u32 last_size = 0;
  bool relinquished = false;
  std::vector<u16> unfinished;                         // by cell: writes that have been issued and not been done
  u32 queued = 0;                                      // MMAs, copies and commits in flight
  std::vector<std::vector<TensorMove>> loads, stores;  // by warp
  // For the search for races
  u32 sequence = 0;                         // MMAs and copies
  std::vector<u32> issued, loaded, stored;  // by warp: its last MMA or copy; its loads and stores
  int last_issuer = -1;
  u32 last_clock = 0;
  std::vector<u32> write_clock, read_clock;  // by cell; by cell and agent
  std::vector<int> write_agent;

  u32& word(u32 lane, u32 column) { return words[lane * TENSOR_COLUMNS + column]; }
  // Fails unless these columns are allocated, all at once.
  void check_columns(Cta&, Warp&, const Op&, u32 first, u32 count) const;
  // For the search for races: accesses, and that nobody has accessed some columns yet
  void read(Cta&, Warp&, const Op&, u32 cell, Agent by);
  void read_operand(Cta&, Warp&, const Op&, u32 cell, Agent by);  // of an MMA, which must have been written
  void write(Cta&, Warp&, const Op&, u32 cell, Agent by);
  void forget(const Cta&, u32 first, u32 count);
  void end(Cta&) override;

 private:
  size_t reader_slot(const Cta&, u32 cell, int agent) const;
  void check_writer(Cta&, Warp&, const Op&, u32 cell, int agent, const char* what) const;
};

// The tensor memory of this CTA; made at its first use
TensorMemory& tensor_memory(Cta&);

// For an instruction that names a register in flight: if tcgen05.lds load it, they are done now, and it returns true.
bool settle_tensor_loads(Cta&, Warp&, u32 offset);

}  // namespace emu
