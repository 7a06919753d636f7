// The choice of the asynchronous operation that takes effect next.
#include "in_flight.h"

#include "machine.h"

namespace emu {

bool InFlight::complete_one(Cta& cta, bool any) {
  if (operations.empty()) return false;
  size_t k = any ? cta.launch->random() % operations.size() : 0;
  if (u32 queue = operations[k]->queue(); queue != NONE)
    for (k = 0; operations[k]->queue() != queue;) k++;
  std::unique_ptr<AsyncOperation> next = std::move(operations[k]);
  operations.erase(operations.begin() + long(k));
  next->complete(cta);
  return true;
}

const AsyncOperation* InFlight::signalling(u32 address) const {
  for (const auto& operation : operations)
    if (operation->signals(address)) return operation.get();
  return nullptr;
}

}  // namespace emu
