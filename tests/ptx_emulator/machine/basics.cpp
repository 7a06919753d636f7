// Text. Formatted text is cut at 4095 characters: messages quote PTX, which may be long.
#include "basics.h"

#include <cstdarg>
#include <cstdio>

namespace emu {

namespace {

std::string formatted(const char* format, va_list list) {
  char buffer[4096];
  vsnprintf(buffer, sizeof buffer, format, list);
  return buffer;
}

}  // namespace

std::string format(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::string text = formatted(format, list);
  va_end(list);
  return text;
}

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::string text = formatted(format, list);
  va_end(list);
  throw Error{text};
}

std::string trimmed(const std::string& s) {
  size_t first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}
bool starts_with(const std::string& s, const char* start) { return s.compare(0, strlen(start), start) == 0; }
std::vector<std::string> split(const std::string& s, char separator) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (char c : s) {
    if (c == '{' || c == '[' || c == '(') depth++;
    if (c == '}' || c == ']' || c == ')') depth--;
    if (c == separator && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  part = trimmed(part);
  if (!part.empty() || !parts.empty()) parts.push_back(part);
  return parts;
}

}  // namespace emu
