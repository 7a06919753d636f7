// Bulk tensor stores and reductions (TMA) and their groups, which belong to threads. Shared memory is read and global
// memory written when issued, or as late as cp.async.bulk.wait_group allows.
#pragma once
#include <vector>

#include "tensor_maps.h"

namespace emu {

struct Launch;
struct Instruction;
class Decoder;

enum class Reduction : u8 { None, Add };

struct BulkStore {
  TensorMap map;
  s32 coordinates[5];
  u32 shared;
  Reduction reduction;
  int op;
  bool read = false;     // shared memory has been read
  std::vector<u8> data;  // as read from there
  u64 cta;
  int warp, lane;
};

struct BulkStoreState {
  std::vector<BulkStore> open;                     // not committed
  std::vector<std::vector<BulkStore>> groups[32];  // by lane
  u32 sequence = 0;                                // groups committed
};

void decode_bulk_store(Decoder&, Instruction&);
void decode_bulk_group(Decoder&, Instruction&);
void write_global(Launch&, const BulkStore&);
void end_bulk_stores(Cta&, Warp&);

}  // namespace emu
