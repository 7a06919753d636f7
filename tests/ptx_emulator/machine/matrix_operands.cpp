// From the layout of an operand to its chunks of 16 bytes, and to its elements.
#include "matrix_operands.h"

#include "messages.h"

namespace emu {

namespace {

// PTX ISA, Asynchronous Warpgroup Level Matrix Shared Memory Layout, and tcgen05: Shared Memory Descriptor. The address
// of the 16 bytes that hold element (mn, k), where mn is a row of A or a column of B. K-major: rows of `width` bytes
// along k, 8 of them in a core matrix, `stride` from one to the next along mn. MN-major: the same with the roles
// exchanged, where `leading` goes from one pattern to the next along mn, and `stride` along k.
u32 address_of(const Part& p, u32 mn, u32 k) {
  const OperandLayout& d = p.layout;
  const u32 element_bytes = bytes_of(p.element);
  const u32 width = d.swizzle == Swizzle::None ? 16 : 16u << int(d.swizzle);
  const bool swizzles = d.swizzle != Swizzle::None;
  u32 at = d.start;
  if (!p.mn_major) {
    const u32 chunk = k * element_bytes / 16;
    at += mn / 8 * d.stride + mn % 8 * width + chunk * (swizzles ? 16 : d.leading);
  } else {
    const u32 chunk = mn * element_bytes / 16, across = width / 16;
    at += k % 8 * width;
    at += swizzles ? chunk % across * 16 + chunk / across * d.leading + k / 8 * d.stride
                   : chunk * d.stride + k / 8 * d.leading;
  }
  return swizzled(at, d.swizzle);
}

// Calls f(mn, k, address) for all chunks of 16 bytes of a part; mn counts from its first.
template <class F>
void for_chunks(Cta& cta, Warp& w, const Op& o, const Part& part, F f) {
  const u32 per_chunk = 16 / bytes_of(part.element);
  const u32 step_mn = part.mn_major ? per_chunk : 1, step_k = part.mn_major ? 1 : per_chunk;
  for (u32 mn = 0; mn < part.count; mn += step_mn)
    for (u32 k = 0; k < part.depth; k += step_k) {
      u32 at = address_of(part, part.first + mn, k);
      check_shared(cta, w, o, 0, at, 16);
      f(mn, k, at);
    }
}

}  // namespace

void read_part(Cta& cta, Warp& w, const Op& o, const Part& part, float* matrix, u32 pitch) {
  const u32 bytes = bytes_of(part.element);
  for_chunks(cta, w, o, part, [&](u32 mn, u32 k, u32 at) {
    const u8* chunk = cta.shared_at(at);
    for (u32 n = 0; n < 16 / bytes; n++) {
      const float v = element(part.element, chunk + n * bytes);
      if (part.mn_major) matrix[k * pitch + mn + n] = v;
      else matrix[(k + n) * pitch + mn] = v;
    }
  });
}

void record_part(Cta& cta, Warp& w, const Op& o, const Part& part, Agent by) {
  for_chunks(cta, w, o, part, [&](u32, u32, u32 at) {
    race_read(cta, w, o, at, 16, by);
    async_access(cta, w, o, at, 16, Access::Read);
  });
}

}  // namespace emu
