// Asynchronous operations that a CTA has issued and that have not taken effect yet. What they do and which memory they
// use is up to their families; when they do it is up to the scheduler, and so to the mode of the launch.
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
  // Takes effect: the oldest, or (`any`) one that chance picks. False when there is none.
  bool complete_one(Cta& cta, bool any);
  const AsyncOperation* signalling(u32 address) const;
};

}  // namespace emu
