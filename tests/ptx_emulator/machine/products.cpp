// The arithmetic that tensor cores were found to use (Xie et al., MMA-Sim, arXiv:2511.10909): the accumulator and all
// products of an instruction are terms of one sum. Bits of a term below the largest exponent less SumBits::terms are
// dropped, the rest is added exactly, and bits of the result after SumBits::sums are dropped, too.
#include "products.h"

#include "rounding.h"

namespace emu {

namespace {

// The exponent of a factor or of the accumulator (fp32), as its bits say it: a subnormal one has the lowest. That of a
// product is the sum of two, without a carry.
constexpr int OF_ZERO = -1000, LOWEST_OF_FP32 = -126;
int lowest_exponent(Element e) {
  return e == Element::E4M3 ? -6 : e == Element::FP16 || e == Element::E5M2 ? -14 : LOWEST_OF_FP32;
}
int exponent(float value, int lowest) {
  return value == 0 ? OF_ZERO : std::max(int(to_bits(value) >> 23 & 0xff) - 127, lowest);
}

double power_of_two(int exponent) {  // of a normal double
  const u64 bits = u64(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

float cut_off(double value, int fraction) {
  return from_bits(u32(rounded({fraction, FORMAT_F32.exponent}, value, Rounding::Zero)) << (23 - fraction));
}

void add_truncated(const Products& p, SumBits bits, float* sums) {
  int top[Products::MAX_COLUMNS];
  double unit[Products::MAX_COLUMNS], total[Products::MAX_COLUMNS];
  const int lowest_a = lowest_exponent(p.element_a), lowest_b = lowest_exponent(p.element_b);
  for (u32 n = 0; n < p.columns; n++) top[n] = std::max(exponent(sums[n], LOWEST_OF_FP32), LOWEST_OF_FP32);
  for (u32 k = 0; k < p.depth; k++) {
    const int of_a = exponent(p.a[k * p.a_step], lowest_a);
    const float* b = p.b + k * p.b_step;
    for (u32 n = 0; n < p.columns; n++) top[n] = std::max(top[n], of_a + exponent(b[n], lowest_b));
  }
  for (u32 n = 0; n < p.columns; n++) {
    unit[n] = power_of_two(bits.terms - top[n]);
    total[n] = std::trunc(sums[n] * unit[n]);
  }
  for (u32 k = 0; k < p.depth; k++) {
    const double a = p.sign * p.a[k * p.a_step];
    const float* b = p.b + k * p.b_step;
    for (u32 n = 0; n < p.columns; n++) total[n] += std::trunc(a * b[n] * unit[n]);
  }
  for (u32 n = 0; n < p.columns; n++) sums[n] = cut_off(total[n] / unit[n], bits.sums);
}

}  // namespace

void add_products(const Products& p, SumBits bits, float* sums) {
  if (bits.terms) return add_truncated(p, bits, sums);
  for (u32 k = 0; k < p.depth; k++) {
    const float a = p.sign * p.a[k * p.a_step];
    const float* b = p.b + k * p.b_step;
#pragma GCC ivdep
    for (u32 n = 0; n < p.columns; n++) sums[n] += a * b[n];
  }
}

}  // namespace emu
