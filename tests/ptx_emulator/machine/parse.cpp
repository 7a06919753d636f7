// PTX text of one kernel to a program: comments, header, parameters, statements, scopes and labels. No functions, no
// static shared memory, no local memory, no clusters: Triton emits none of them for kernels of one CTA per cluster.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "decoder.h"

namespace emu {

namespace {

struct Line {
  int number;
  std::string text;
};

bool is_name_char(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.'; }

std::string without_comments(std::string s, int number) {
  s = s.substr(0, s.find("//"));
  size_t open = s.find("/*");
  if (open == std::string::npos) return trimmed(s);
  size_t close = s.find("*/", open);
  if (close == std::string::npos) fail("PTX line %d: a comment of several lines", number);
  return trimmed(s.substr(0, open) + s.substr(close + 2));
}

// Lines with code: no comments, no debug information
std::vector<Line> lines_of(const char* text) {
  static const char* ignored[] = {".loc", ".file", ".version", ".address_size", ".pragma", ".target"};
  std::vector<Line> lines;
  int number = 0;
  for (const char* at = text; *at;) {
    const char* end = strchrnul(at, '\n');
    std::string s = without_comments(std::string(at, end), ++number);
    at = *end ? end + 1 : end;
    if (starts_with(s, ".section")) break;
    std::string first = s.substr(0, s.find_first_of(" \t"));
    bool skip = s.empty() || std::find(std::begin(ignored), std::end(ignored), first) != std::end(ignored);
    if (!skip) lines.push_back({number, s});
  }
  return lines;
}

class Parser {
 public:
  explicit Parser(const char* text) : program_(new Program), decoder_(*program_), lines_(lines_of(text)) {}

  Program* parse() {
    module();
    header();
    body();
    resolve();
    keep_wgmma_operands(*program_);
    return program_.release();
  }

 private:
  std::unique_ptr<Program> program_;
  Decoder decoder_;
  std::vector<Line> lines_;
  size_t at_ = 0;  // line
  std::string statement_, last_label_;
  int statement_line_ = 0;
  int vector_depth_ = 0;

  // Statements before the entry: the name of dynamic shared memory
  void module() {
    for (; at_ < lines_.size(); at_++) {
      const std::string& s = lines_[at_].text;
      if (s.find(".entry") != std::string::npos) return;
      if (starts_with(s, ".extern .shared")) {
        size_t bracket = s.find('[');
        size_t name = s.find_last_of(" \t", bracket);
        decoder_.symbols[trimmed(s.substr(name, bracket - name))] = SHARED_BASE;
      } else if (s.find(".shared") != std::string::npos || s.find(".func") != std::string::npos) {
        fail("PTX line %d: not implemented: %s", lines_[at_].number, s.c_str());
      }
    }
    fail("no entry");
  }

  void header() {
    std::string text;
    int first = lines_[at_].number;
    for (; at_ < lines_.size() && lines_[at_].text != "{"; at_++) text += " " + lines_[at_].text;
    at_++;
    size_t entry = text.find(".entry") + strlen(".entry"), open = text.find('(');
    size_t end = open == std::string::npos ? text.find_first_of(" \t", entry + 2) : open;
    program_->name = trimmed(text.substr(entry, end - entry));
    size_t tail = 0;
    if (open != std::string::npos) {
      tail = text.find(')', open);
      for (auto& item : split(text.substr(open + 1, tail - open - 1), ',')) parameter(item);
    }
    auto directive = [&](const char* name) {
      size_t found = text.find(name, tail);
      return found == std::string::npos ? 0 : atoi(text.c_str() + found + strlen(name));
    };
    program_->reqntid = directive(".reqntid");
    program_->maxnreg = directive(".maxnreg");
    if (directive(".reqnctapercluster") > 1) fail("PTX line %d: clusters are not implemented:%s", first, text.c_str());
  }

  // ".param .u64 .ptr .global .align 1 name" or ".param .align 64 .b8 name[128]". Its address is an offset.
  void parameter(const std::string& item) {
    std::vector<std::string> words;
    for (auto& word : split(item, ' '))
      for (auto& part : split(word, '\t'))
        if (!part.empty()) words.push_back(part);
    Type type = Type::None;
    u32 align = 0;
    for (size_t k = 1; k + 1 < words.size(); k++) {
      if (words[k] == ".ptr") break;  // the rest describes the memory that it points to
      if (words[k][0] == '.' && type_named(words[k].substr(1)) != Type::None) type = type_named(words[k].substr(1));
      if (words[k] == ".align") align = u32(atoi(words[k + 1].c_str()));
    }
    if (type == Type::None) throw Error{"parameter: " + item};
    std::string name = words.back();
    Param param{u32(bits_of(type) / 8), 0};
    if (!align) align = param.size;
    if (size_t bracket = name.find('['); bracket != std::string::npos) {
      param.size *= u32(atoi(name.c_str() + bracket + 1));
      name = name.substr(0, bracket);
    }
    param.offset = (program_->param_bytes + align - 1) / align * align;
    program_->param_bytes = param.offset + param.size;
    program_->params.push_back(param);
    decoder_.symbols[name] = param.offset;
  }

  void body() {
    for (; at_ < lines_.size(); at_++) {
      const std::string& s = lines_[at_].text;
      for (size_t k = 0; k <= s.size(); k++) {
        char c = k < s.size() ? s[k] : ' ', next = k + 1 < s.size() ? s[k + 1] : ' ';
        if (trimmed(statement_).empty()) {
          statement_.clear();
          if (c == ' ' || c == '\t' || c == ';') continue;
          statement_line_ = lines_[at_].number;
          if (c == '{') {
            decoder_.scopes.emplace_back();
            continue;
          }
          if (c == '}') {
            if (decoder_.scopes.size() == 1) return;
            close_scope();
            continue;
          }
        }
        if (c == '{') vector_depth_++;
        if (c == '}') vector_depth_--;
        bool double_colon = next == ':' || (k > 0 && s[k - 1] == ':');
        if (c == ':' && !double_colon && vector_depth_ == 0 && label()) continue;
        if (c == ';') end_statement();
        else statement_ += c;
      }
    }
  }

  bool label() {
    std::string name = trimmed(statement_);
    if (!std::all_of(name.begin(), name.end(), is_name_char)) return false;
    decoder_.scopes.back().labels[name] = s32(program_->ops.size());
    last_label_ = name;
    statement_.clear();
    return true;
  }

  void end_statement() {
    std::string s = trimmed(statement_);
    statement_.clear();
    decoder_.line = statement_line_;
    decoder_.statement = s;
    if (starts_with(s, ".reg")) decoder_.declare(s);
    else if (starts_with(s, ".branchtargets")) decoder_.branch_targets[last_label_] = split(s.substr(14), ',');
    else if (starts_with(s, ".local")) decoder_.bad("local memory");
    else if (s[0] == '.') decoder_.bad("directive");
    else decoder_.instruction(s);
  }

  void close_scope() {
    Scope closed = std::move(decoder_.scopes.back());
    decoder_.scopes.pop_back();
    for (auto& [op, name] : closed.branches) {
      auto label = closed.labels.find(name);
      if (label != closed.labels.end()) program_->ops[op].target = label->second;
      else decoder_.scopes.back().branches.push_back({op, name});
    }
  }

  s32 outer_label(const std::string& name) const {
    auto label = decoder_.scopes[0].labels.find(name);
    if (label == decoder_.scopes[0].labels.end()) throw Error{"no label " + name};
    return label->second;
  }
  void resolve() {
    for (auto& [op, name] : decoder_.scopes[0].branches) program_->ops[op].target = outer_label(name);
    for (auto& [op, name] : decoder_.indexed_branches) {
      program_->ops[op].target = s32(program_->branch_tables.size());
      std::vector<s32>& table = program_->branch_tables.emplace_back();
      for (auto& target : decoder_.branch_targets[name]) table.push_back(outer_label(target));
    }
  }
};

}  // namespace

std::string Program::register_name(u32 offset) const {
  for (auto& r : register_names)
    if (r.first == offset) return r.second;
  return format("register at %u", offset);
}

Program* parse(const char* text) { return Parser(text).parse(); }

}  // namespace emu
