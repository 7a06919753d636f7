// Instructions of tcgen05 that a CTA does in the order of their issue, at times that the mode decides: mma, cp, commit.
#pragma once
#include <memory>

#include "tcgen05.h"

namespace emu {

struct TensorOperation : AsyncOperation {
  static constexpr u32 QUEUE = 0;
  int op, warp;
  bool was_queued = false;

  TensorOperation(const Op& o, const Warp& w) : op(o.number), warp(w.id) {}
  virtual void perform(Cta& cta, Warp& w, const Op& o) = 0;
  virtual void wait_in_queue(Cta&) {}
  void complete(Cta& cta) override {
    perform(cta, *cta.warps[size_t(warp)], cta.program->ops[size_t(op)]);
    if (was_queued) tensor_memory(cta).queued--;
  }
  u32 queue() const override { return QUEUE; }
};

void issue_in_order(Cta&, std::unique_ptr<TensorOperation>);

// Counts an mma or a cp, and returns the time of its accesses. Notes if a warp issues it that is not ordered after the
// one that issued the last.
Agent next_in_order(Cta&, Warp&, const Op&);

}  // namespace emu
