// Sectors and bank conflicts. Shared memory has 32 banks of 4 bytes; wide accesses are made in phases of 128 bytes.
#include "banks.h"

#include <algorithm>

namespace emu {

int count_sectors(const Addresses& address, u32 mask, u32 size) {
  u64 seen[64];
  int n = 0;
  for_lanes(mask, [&](int i) {
    for (u64 sector = address[i] >> 5; sector <= (address[i] + size - 1) >> 5; sector++) {
      int k = n - 1;  // backwards: neighbours share sectors
      while (k >= 0 && seen[k] != sector) k--;
      if (k < 0) seen[n++] = sector;
    }
  });
  return n;
}

void count_wavefronts(Cta& cta, const Op& o, const Addresses& address, u32 mask, u32 size, Counter conflicts) {
  const int per_phase = size <= 4 ? 32 : size == 8 ? 16 : 8;
  u64 total = 0, phases = 0;
  for (int first = 0; first < LANES; first += per_phase) {
    u32 words[32][32];  // by bank: the different ones
    u8 count[32] = {};
    int most = 0;
    for (int i = first; i < first + per_phase; i++) {
      if (!on(mask, i)) continue;
      for (u32 word = u32(address[i]) / 4; word <= (u32(address[i]) + size - 1) / 4; word++) {
        u32 bank = word & 31;
        int k = 0;
        while (k < count[bank] && words[bank][k] != word) k++;
        if (k == count[bank]) words[bank][count[bank]++] = word, most = std::max<int>(most, count[bank]);
      }
    }
    if (most) total += u64(most), phases++;
  }
  u64* c = cta.launch->counters;
  c[C_SHARED_ACCESSES]++;
  c[C_SHARED_WAVEFRONTS] += total;
  c[conflicts] += total - phases;
  cta.launch->op_conflicts[size_t(o.number)] += total - phases;
}

void count_matrix_conflicts(Cta& cta, const Op& o, const Addresses& address, int matrices) {
  u64* c = cta.launch->counters;
  c[C_LDST_MATRIX]++;
  for (int k = 0; k < matrices; k++) {
    u8 used[8] = {};  // by group of 4 banks
    int most = 0;
    u64 rows[8];
    for (int r = 0; r < 8; r++) {
      rows[r] = address[8 * k + r] / 16;
      bool again = std::find(rows, rows + r, rows[r]) != rows + r;
      if (!again) most = std::max<int>(most, ++used[rows[r] % 8]);
    }
    c[C_LDST_MATRIX_CONFLICTS] += u64(most - 1);
    cta.launch->op_conflicts[size_t(o.number)] += u64(most - 1);
  }
}

}  // namespace emu
