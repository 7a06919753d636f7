// Unpacking of tcgen05's descriptors: reserved bits must be zero; fields that are not implemented are errors.
#include "tcgen05_descriptors.h"

#include "messages.h"

namespace emu {

namespace {

// In descriptors of .kind::mxf8f6f4, bits 4-5 and 29-30 choose scale factors, bit 23 is their type, 27-28 are M / 128.
constexpr u32 RESERVED = 3u | 1u << 3 | 1u << 6 | 1u << 23 | 7u << 29;
constexpr u32 RESERVED_WITH_SCALES = 3u | 1u << 3 | 1u << 6 | 7u << 24 | 1u << 31;

}  // namespace

MmaShape unpack_instruction(Cta& cta, Warp& w, const Op& o, MmaKind kind, u32 bits) {
  const bool scaled = kind == MmaKind::MXF8;
  auto require = [&](bool fine, const std::string& what) {
    if (!fine) fail_at(cta, w, o, 0, format("tcgen05.mma: instruction descriptor 0x%08x: %s", bits, what.c_str()));
  };
  auto field = [&](int shift, u32 mask) { return bits >> shift & mask; };
  require(!(bits & (scaled ? RESERVED_WITH_SCALES : RESERVED)), "reserved bits");
  require(!scaled || field(23, 1), "scale factors other than UE8M0: not implemented");
  require(!field(2, 1), "sparse");
  const u32 d = field(4, 3), a = field(7, 7), b = field(10, 7);
  MmaShape shape;
  if (scaled || kind == MmaKind::F8) {
    require(a <= 1 && b <= 1, "types other than e4m3 and e5m2: not implemented");
    require(scaled || d == 1, "sums other than fp32 with 8 bits: not implemented");
    shape.a = a ? Element::E5M2 : Element::E4M3, shape.b = b ? Element::E5M2 : Element::E4M3;
  } else if (kind == MmaKind::TF32) {
    require(d == 1 && a == 2 && b == 2, "types of kind::tf32");
    shape.a = shape.b = Element::TF32;
  } else {
    require(d <= 1 && a <= 1 && b <= 1 && (d == 1 || (a == 0 && b == 0)), "types of kind::f16");
    shape.a = a ? Element::BF16 : Element::FP16, shape.b = b ? Element::BF16 : Element::FP16;
  }
  shape.half_d = kind == MmaKind::F16 && d == 0;
  shape.scale_byte_a = scaled ? field(29, 3) : 0, shape.scale_byte_b = scaled ? d : 0;
  shape.negate_a = field(13, 1), shape.negate_b = field(14, 1);
  shape.mn_major_a = field(15, 1), shape.mn_major_b = field(16, 1);
  shape.n = field(17, 63) * 8, shape.m = field(24, 31) * 16, shape.k = 32 / bytes_of(shape.a);
  require((shape.m == 64 && !scaled) || shape.m == 128, format("M %u", shape.m));
  const u32 step = shape.m == 128 ? 16 : 8;
  require(shape.n >= step && shape.n <= 256 && shape.n % step == 0, format("N %u with M %u", shape.n, shape.m));
  return shape;
}

OperandLayout unpack_matrix(Cta& cta, Warp& w, const Op& o, u64 bits, bool tf32, bool mn_major, const char* name) {
  auto require = [&](bool fine, const char* what) {
    if (!fine) fail_at(cta, w, o, 0, format("descriptor of %s 0x%016llx: %s", name, (unsigned long long)bits, what));
  };
  auto field = [&](int shift, u64 mask) { return u32(bits >> shift & mask); };
  require(field(46, 7) == 1, "bits 46-48 are not 1: no descriptor of tcgen05");
  require(!field(14, 3) && !field(30, 3) && !field(53, 255), "reserved bits");
  require(!field(49, 7), "base offset: not implemented");
  require(!field(52, 1), "absolute leading dimension: sm_103a only");
  const u32 mode = field(61, 7);
  require(mode != 1, "swizzle of 128 bytes with atoms of 32: not implemented");
  require(mode % 2 == 0, "swizzle");
  require(!(mn_major && tf32), "32-bit elements along M or N need the swizzle of 128 bytes with atoms of 32");
  static const Swizzle modes[] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
  return {field(0, 0x3fff) << 4, field(16, 0x3fff) << 4, field(32, 0x3fff) << 4, modes[mode / 2]};
}

}  // namespace emu
