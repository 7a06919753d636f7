// Tensor maps (CUtensorMap): the 128 opaque bytes hold the fields that this emulator needs. Tiled mode only, without
// interleave and element strides.
#pragma once
#include <algorithm>

#include "basics.h"

namespace emu {

struct Cta;
struct Warp;
struct Op;

// PTX ISA, Tensors: Swizzling Modes; with the numbers of CUtensorMapSwizzle and of tensormap.replace
enum class Swizzle : u8 { None, B32, B64, B128 };

// CUtensorMapDataType
enum class ElementType : u8 { U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32_FTZ, TF32, TF32_FTZ };
constexpr int ELEMENT_TYPES = 13;

struct TensorMap {
  static constexpr u32 MAGIC = 0x54414d54;
  u32 magic, rank;
  u64 base;
  u64 dims[5];
  u64 strides[4];  // in bytes, of dimensions 1...
  u16 box[5];
  Swizzle swizzle;
  ElementType type;
  u8 item;      // bytes of an element
  u8 nan_fill;  // elements out of bounds are NaN, not zero

  u64 box_bytes() const {
    u64 n = item;
    for (u32 k = 0; k < rank; k++) n *= box[k];
    return n;
  }
};
constexpr u32 TENSOR_MAP_BYTES = 128;
static_assert(sizeof(TensorMap) <= TENSOR_MAP_BYTES);

// Arguments of cuTensorMapEncodeTiled; dimensions from the innermost one on, strides in bytes
struct MapEncoding {
  u64 base;
  int rank;
  const u64 *dims, *strides;
  const u32* box;
  int swizzle, type, item;
  bool nan_fill;

  // Returns the error, or empty and the map in `out`; `note` has what is allowed and unusual.
  std::string encode(TensorMap& out, std::string& note) const;
};

// PTX ISA, Tensors: Swizzling Modes: chunks of 16 bytes are permuted within rows of 128 bytes, by the number of the
// row.
inline u32 swizzled(u32 address, Swizzle mode) {
  u32 mask = mode == Swizzle::B128 ? 7 : mode == Swizzle::B64 ? 3 : mode == Swizzle::B32 ? 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

// The map at an address in global memory or among the parameters
TensorMap read_map(Cta&, Warp&, const Op&, int lane, u64 address, u32 rank);

// A row of the box at some coordinates: its elements lie in a row in global memory, and [inside, end) of its bytes are
// within the tensor.
struct BoxRow {
  u64 address;
  u32 offset, bytes;  // in the box
  u32 inside, end;
  bool empty() const { return end <= inside; }
};
template <class F>
void for_rows(const TensorMap& t, const s32* coordinates, F f) {
  u32 rows = 1;
  for (u32 k = 1; k < t.rank; k++) rows *= t.box[k];
  u32 bytes = u32(t.box[0]) * t.item;
  s64 low = std::max<s64>(0, -s64(coordinates[0]));
  s64 high = std::max(low, std::min<s64>(t.box[0], s64(t.dims[0]) - coordinates[0]));
  for (u32 r = 0; r < rows; r++) {
    u32 rest = r;
    bool inside = true;
    u64 address = t.base + u64(s64(coordinates[0])) * t.item;
    for (u32 k = 1; k < t.rank; k++) {
      s64 at = s64(coordinates[k]) + rest % t.box[k];
      rest /= t.box[k];
      if (at < 0 || u64(at) >= t.dims[k]) inside = false;
      address += u64(at) * t.strides[k - 1];
    }
    f(BoxRow{address, r * bytes, bytes, inside ? u32(low) * t.item : 0u, inside ? u32(high) * t.item : 0u});
  }
}

}  // namespace emu
