// Lines of 64 bytes with a bit for each byte that was written: the first write of a byte keeps what it held.
#include "journal.h"

#include <algorithm>
#include <vector>

namespace emu {

void Journal::before_write(u64 address, u64 size) {
  for (u64 end = address + size; address < end;) {
    u64 first = address % LINE, count = std::min(LINE - first, end - address);
    Line& line = lines_[address / LINE];
    for (u64 k = first; k < first + count; k++)
      if (!(line.written >> k & 1)) {
        line.before[k] = *reinterpret_cast<const u8*>(address - first + k);
        line.written |= 1ull << k;
      }
    address += count;
  }
}

void Journal::finish() {
  for (auto& [number, line] : lines_)
    for (u64 k = 0; k < LINE; k++)
      if (line.written >> k & 1) line.after[k] = *reinterpret_cast<const u8*>(number * LINE + k);
}

void Journal::undo() {
  finish();
  for (auto& [number, line] : lines_)
    for (u64 k = 0; k < LINE; k++)
      if (line.written >> k & 1) *reinterpret_cast<u8*>(number * LINE + k) = line.before[k];
}

std::string Journal::difference(const Journal& a, const std::string& name_a, const Journal& b,
                                const std::string& name_b) {
  std::vector<u64> numbers;
  for (auto& entry : a.lines_) numbers.push_back(entry.first);
  for (auto& entry : b.lines_)
    if (!a.lines_.count(entry.first)) numbers.push_back(entry.first);
  std::sort(numbers.begin(), numbers.end());
  const Line none{};
  auto of = [&](const Journal& journal, u64 number) -> const Line& {
    auto found = journal.lines_.find(number);
    return found == journal.lines_.end() ? none : found->second;
  };
  auto value = [](const Line& line, u64 k, const std::string& name) {
    return line.written >> k & 1 ? format("0x%02x (%s)", line.after[k], name.c_str())
                                 : format("not written (%s)", name.c_str());
  };
  u64 first = 0, count = 0;
  std::string values;
  for (u64 number : numbers) {
    const Line &x = of(a, number), &y = of(b, number);
    for (u64 k = 0; k < LINE; k++) {
      bool in_x = x.written >> k & 1, in_y = y.written >> k & 1;
      if (in_x == in_y && (!in_x || x.after[k] == y.after[k])) continue;
      if (!count++) first = number * LINE + k, values = value(x, k, name_a) + ", " + value(y, k, name_b);
    }
  }
  if (!count) return "";
  return format("global memory differs between %s and %s: %llu bytes, the first at 0x%llx: %s", name_a.c_str(),
                name_b.c_str(), (unsigned long long)count, (unsigned long long)first, values.c_str());
}

}  // namespace emu
