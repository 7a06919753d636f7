// Sums of products of one MMA: a row of A times columns of B, added to a row of D.
#pragma once
#include "matrix_elements.h"

namespace emu {

inline SumBits sum_bits(const Cta& cta, Element a) {
  const Config& config = cta.launch->config;
  return is_8_bit(a) ? config.narrow_sums : config.wide_sums;
}

// a[k * a_step] * b[k * b_step + n], for each column n
struct Products {
  const float *a, *b;
  u32 a_step, b_step;
  u32 depth, columns;  // at most MAX_COLUMNS
  Element element_a, element_b;
  float sign = 1.0f;
  static constexpr u32 MAX_COLUMNS = 256;
};

void add_products(const Products&, SumBits, float* sums);

}  // namespace emu
