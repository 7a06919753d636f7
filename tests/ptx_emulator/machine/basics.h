// Fixed-width types, errors, and text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace emu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

// "There is none", where an offset, an index or an address is expected.
constexpr u32 NONE = 0xffffffffu;

struct Error {
  std::string text;
};
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

std::string trimmed(const std::string&);
bool starts_with(const std::string&, const char* start);
// Parts between separators that are in no brackets
std::vector<std::string> split(const std::string&, char separator);

}  // namespace emu
