// Text of a warp's position, of the waits in a deadlocked CTA, and of notes, which do not end the launch.
#include "messages.h"

#include <algorithm>

namespace emu {

namespace {

std::string what_it_waits_for(const Cta& cta, const Warp& w) {
  switch (w.state) {
    case Warp::State::Done: return "ended";
    case Warp::State::AtBarrier: {
      const Barrier& b = cta.barriers[w.barrier];
      return format("at barrier %d (%u of %u threads came)", w.barrier, b.arrived, b.expected);
    }
    case Warp::State::AtMbarrier: {
      std::string text =
          format("at the mbarrier at shared offset %u, parity %u", w.mbarrier_address - SHARED_BASE, w.mbarrier_parity);
      auto found = cta.mbarriers.at.find(w.mbarrier_address);
      if (found == cta.mbarriers.at.end()) return text;
      const Mbarrier& b = found->second;
      return text + format(" (phase %llu, pending %u of %u, tx %lld)", (unsigned long long)b.phase, b.pending,
                           b.expected, (long long)b.transactions);
    }
    case Warp::State::AtRegisters:
      return format("at setmaxnreg (%d of %d registers, %d free in the CTA)", w.register_count, w.wanted_registers,
                    cta.free_registers);
    default: return "running";
  }
}

// Notes that differ only in the CTA and the warp are the same note.
std::string without_place(const std::string& note) { return note.substr(0, note.find('[')); }

}  // namespace

std::string where(const Cta& cta, const Warp& w, const Op& o) {
  std::string text = cta.program->text[size_t(o.number)];
  if (text.size() > 160) text = text.substr(0, 160) + "...";
  return format("%s, PTX line %d: `%s` [CTA (%u, %u, %u), warp %d]", cta.program->name.c_str(), o.line, text.c_str(),
                cta.index[0], cta.index[1], cta.index[2], w.id);
}

void fail_at(const Cta& cta, const Warp& w, const Op& o, int lane, const std::string& text) {
  throw Error{format("%s: lane %d: %s", where(cta, w, o).c_str(), lane, text.c_str())};
}

void fail_deadlock(const Cta& cta, const char* why) {
  const Program& program = *cta.program;
  std::string text =
      format("%s in %s, CTA (%u, %u, %u):", why, program.name.c_str(), cta.index[0], cta.index[1], cta.index[2]);
  for (const auto& w : cta.warps) {
    text += format("\n  warp %d: ", w->id) + what_it_waits_for(cta, *w);
    for (const Fragment& f : w->fragments) {
      size_t pc = std::min(size_t(f.pc), program.ops.size() - 1);
      text += format("; lanes %08x at PTX line %d: %.80s", f.mask, program.ops[pc].line, program.text[pc].c_str());
    }
  }
  throw Error{text};
}

void Launch::note(const std::string& text) {
  if (note_counts[without_place(text)]++ == 0) notes.push_back(text);
}

int Launch::count_of(const std::string& note) const { return note_counts.at(without_place(note)); }

}  // namespace emu
