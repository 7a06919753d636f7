// Global memory that a launch overwrites: a launch can be undone and run again from the same state in another order,
// and the writes of two orders can be compared, byte by byte.
#pragma once
#include <unordered_map>

#include "basics.h"

namespace emu {

class Journal {
 public:
  // To be called before bytes are written.
  void before_write(u64 address, u64 size);
  // Keeps the bytes that the launch has written, and restores those that were there before.
  void undo();
  // The first byte at which two journals differ, in words; empty if there is none. Both were undone or `finish`ed.
  // Bytes that only one of them wrote differ.
  static std::string difference(const Journal& a, const std::string& name_a, const Journal& b,
                                const std::string& name_b);
  // Keeps the bytes that the launch has written, and leaves memory as it is.
  void finish();

 private:
  static constexpr u64 LINE = 64;
  struct Line {
    u64 written = 0;  // bit for each byte
    u8 before[LINE], after[LINE];
  };
  std::unordered_map<u64, Line> lines_;  // by address / LINE
};

}  // namespace emu
