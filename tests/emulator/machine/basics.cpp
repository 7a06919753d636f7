// Text formatted as by printf, cut at 4095 characters: messages quote PTX, which may be long.
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

}  // namespace emu
