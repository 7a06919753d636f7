// Encoding of tensor maps, reading them, and changing them on the device (tensormap.replace, tensormap.cp_fenceproxy).
#include "tensor_maps.h"

#include "families.h"
#include "lanes.h"
#include "messages.h"

namespace emu {

namespace {

u32 bytes_of(ElementType t) {
  switch (t) {
    case ElementType::U8: return 1;
    case ElementType::U16:
    case ElementType::F16:
    case ElementType::BF16: return 2;
    case ElementType::U64:
    case ElementType::S64:
    case ElementType::F64: return 8;
    default: return 4;
  }
}

enum class Field : u8 {
  GlobalAddress,
  Rank,
  BoxDim,
  GlobalDim,
  GlobalStride,
  ElementStride,
  ElementType,
  Interleave,
  Swizzle,
  Fill
};
struct ReplaceOptions {
  Field field;
  Space space;
  u8 ordinal;  // index of a dimension
  u8 bits;
};
const std::map<std::string, Field> fields = {{"global_address", Field::GlobalAddress},
                                             {"rank", Field::Rank},
                                             {"box_dim", Field::BoxDim},
                                             {"global_dim", Field::GlobalDim},
                                             {"global_stride", Field::GlobalStride},
                                             {"element_stride", Field::ElementStride},
                                             {"elemtype", Field::ElementType},
                                             {"interleave_layout", Field::Interleave},
                                             {"swizzle_mode", Field::Swizzle},
                                             {"fill_mode", Field::Fill}};

// PTX ISA, tensormap.replace: its numbers of types are not those of the host's interface.
constexpr ElementType types_of_replace[ELEMENT_TYPES] = {
    ElementType::U8,   ElementType::U16,  ElementType::U32,     ElementType::S32,     ElementType::U64,
    ElementType::S64,  ElementType::F16,  ElementType::F32,     ElementType::F32_FTZ, ElementType::F64,
    ElementType::BF16, ElementType::TF32, ElementType::TF32_FTZ};

void set_field(Cta& cta, Warp& w, const Op& o, int lane, TensorMap& t, u64 value) {
  const auto& options = o.get<ReplaceOptions>();
  auto require = [&](bool fine, const char* what) {
    if (!fine) fail_at(cta, w, o, lane, format("tensor map: %s", what));
  };
  switch (options.field) {
    case Field::GlobalAddress: t.base = value; break;
    case Field::Rank: t.rank = u32(value) + 1; break;
    case Field::BoxDim: t.box[options.ordinal] = u16(value); break;
    case Field::GlobalDim: t.dims[options.ordinal] = u32(value); break;
    case Field::GlobalStride: t.strides[options.ordinal] = value; break;
    case Field::ElementStride: require(value == 1, "element stride"); break;
    case Field::Interleave: require(value == 0, "interleave"); break;
    case Field::Swizzle: require(value < 4, "swizzle"), t.swizzle = Swizzle(value); break;
    case Field::Fill: t.nan_fill = u8(value); break;
    case Field::ElementType:
      require(value < ELEMENT_TYPES, "element type");
      t.type = types_of_replace[value], t.item = u8(bytes_of(t.type));
      break;
  }
}

void replace(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const auto& options = o.get<ReplaceOptions>();
  const Addresses at = addresses(w, o.address[0]);
  for_lanes(mask, [&](int i) {
    u8* p = locate(cta, w, o, i, options.space, at[i], TENSOR_MAP_BYTES, Access::Write);
    if (options.space == Space::Shared) shared_write(cta, w, o, u32(at[i]), TENSOR_MAP_BYTES);
    TensorMap t;
    memcpy(&t, p, sizeof t);
    t.magic = TensorMap::MAGIC;
    set_field(cta, w, o, i, t, read_unsigned(w, o.s[0], options.bits, i));
    memcpy(p, &t, sizeof t);
  });
}

// It is a fence, too, which orders nothing here: global memory is coherent.
void copy_and_fence(Cta& cta, Warp& w, const Op& o, u32 mask) {
  const int lane = __builtin_ctz(mask);
  const u64 to = addresses(w, o.address[0])[lane];
  const u32 from = u32(addresses(w, o.address[1])[lane]);
  check_shared(cta, w, o, lane, from, TENSOR_MAP_BYTES);
  shared_read(cta, w, o, from, TENSOR_MAP_BYTES);
  u8* p = locate(cta, w, o, lane, Space::Global, to, TENSOR_MAP_BYTES, Access::Write);
  memcpy(p, cta.shared_at(from), TENSOR_MAP_BYTES);
}

}  // namespace

void decode_tensor_map(Decoder& d, Instruction& i) {
  if (i.operands.size() < 2) return;
  i.op.address[0] = d.address(i.operands[0]);
  if (i.word(1) == "cp_fenceproxy") {
    i.op.address[1] = d.address(i.operands[1]);
    i.op.fn = copy_and_fence;
  }
  if (i.word(1) != "replace") return;
  auto found = fields.end();
  for (auto& word : i.words)
    if (fields.count(word)) found = fields.find(word);
  if (found == fields.end()) return;
  const Space space = space_of(i) == Space::Shared ? Space::Shared : Space::Global;
  const u8 ordinal = i.operands.size() == 3 ? u8(i.operands[1].value) : 0;
  if (ordinal > 4) d.bad("dimension");
  const u8 bits = found->second == Field::GlobalAddress || found->second == Field::GlobalStride ? 64 : 32;
  i.op.set<ReplaceOptions>() = {found->second, space, ordinal, bits};
  i.op.s[0] = d.source(i.operands.back(), bits);
  i.op.fn = replace;
}

TensorMap read_map(Cta& cta, Warp& w, const Op& o, int lane, u64 address, u32 rank) {
  const u64 params = u64(cta.launch->params);
  const bool in_params = address >= params && address + TENSOR_MAP_BYTES <= params + cta.program->param_bytes;
  if (address % 64) fail_at(cta, w, o, lane, "tensor map: misaligned");
  if (!in_params) check_global(cta, w, o, lane, address, TENSOR_MAP_BYTES, Access::Read);
  TensorMap t;
  memcpy(&t, reinterpret_cast<const void*>(address), sizeof t);
  if (t.magic != TensorMap::MAGIC) fail_at(cta, w, o, lane, "no tensor map there");
  if (t.rank != rank) fail_at(cta, w, o, lane, format("tensor map of rank %u, instruction of rank %u", t.rank, rank));
  return t;
}

// The rules of cuTensorMapEncodeTiled
std::string MapEncoding::encode(TensorMap& out, std::string& note) const {
  if (rank < 1 || rank > 5) return "rank";
  if (base % 16) return "the base address is not a multiple of 16";
  std::string bad;
  for (int k = 0; k < rank; k++) {
    if (dims[k] < 1 || dims[k] > 1ull << 32)
      bad = format("size %d is not in 1...2^32: %llu", k, (unsigned long long)dims[k]);
    if (box[k] < 1 || box[k] > 256) bad = format("box size %d is not in 1...256: %u", k, box[k]);
    if (k + 1 == rank) break;
    const u64 stride = strides[k];
    if (stride % 16) bad = format("stride %d is not a multiple of 16 bytes: %llu", k + 1, (unsigned long long)stride);
    if (stride >= 1ull << 40) bad = format("stride %d is 2^40 bytes or more: %llu", k + 1, (unsigned long long)stride);
    if (k > 0 && stride < strides[k - 1]) note += format("stride %d is less than that before; ", k + 1);
    if (k > 0 && strides[k - 1] && stride % strides[k - 1])
      note += format("stride %d is no multiple of that before; ", k + 1);
    if (stride == 0) note += format("stride %d is zero; ", k + 1);
  }
  static const u64 spans[] = {0, 32, 64, 128};
  const u64 inner = u64(box[0]) * u64(item);
  if (inner % 16) bad = format("the inner box has %llu bytes, not a multiple of 16", (unsigned long long)inner);
  if (swizzle < 0 || swizzle > 3) bad = "swizzle";
  else if (swizzle && inner > spans[swizzle])
    bad = format("the inner box has %llu bytes, the swizzle spans %llu", (unsigned long long)inner,
                 (unsigned long long)spans[swizzle]);
  if (type < 0 || type >= ELEMENT_TYPES || int(bytes_of(ElementType(type))) != item)
    bad = format("type %d with elements of %d bytes", type, item);
  if (nan_fill && type < int(ElementType::F16)) bad = "NaN fill of integers";
  if (!bad.empty()) return bad;
  memset(&out, 0, sizeof out);
  out.magic = TensorMap::MAGIC, out.rank = u32(rank), out.base = base;
  for (int k = 0; k < rank; k++) out.dims[k] = dims[k], out.box[k] = u16(box[k]);
  for (int k = 0; k + 1 < rank; k++) out.strides[k] = strides[k];
  out.swizzle = Swizzle(swizzle), out.type = ElementType(type), out.item = u8(item), out.nan_fill = nan_fill;
  return "";
}

}  // namespace emu
