// Asynchronous operations that a CTA has issued and that have not taken effect yet. Their families define their
// effects and the memory that they use; the scheduler, by the mode of the launch, decides when they take effect.
#pragma once
#include <memory>
#include <vector>

#include "basics.h"

namespace emu {

struct Cta;

struct AsyncOperation {
  virtual ~AsyncOperation() = default;
  virtual void complete(Cta& cta) = 0;
  // Operations of one queue (not NONE) complete in the order in which they were issued.
  virtual u32 queue() const { return NONE; }
  // Does it signal the mbarrier at this shared address?
  virtual bool signals(u32) const { return false; }
  // "a TMA load": for messages
  virtual const char* name() const = 0;
};

struct InFlight {
  std::vector<std::unique_ptr<AsyncOperation>> operations;

  void add(std::unique_ptr<AsyncOperation> operation) { operations.push_back(std::move(operation)); }
  // Makes the oldest operation take effect, or (`any`) a random one. False when there is none.
  bool complete_one(Cta& cta, bool any);
  const AsyncOperation* signalling(u32 address) const;
};

}  // namespace emu
