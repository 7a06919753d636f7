"""Copies and allocations of tensors as large as a weight, by PyTorch's profiler."""

from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_TorchOp, _TensorMetadata
from torch.profiler import ProfilerActivity, profile

COPIES = ("aten::clone", "aten::copy_", "aten::add", "aten::add_", "aten::mul")  # DDP's reducer copies by a `mul`


def copies_and_allocations(run, weights, within=""):
    """While `run()` runs: copies and adds of tensors of a weight's shape, and allocations of a weight's size or more.

    With `within`, only those in autograd nodes of that type, and the number of these nodes. A communication hook, in a
    `record_function("comm hook")`, does not count.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as prof:
        run()
    shapes, smallest = {tuple(w.shape) for w in weights}, min(w.nbytes for w in weights)
    copies = allocations = nodes = 0
    todo = [(event, not within, False) for event in prof.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, inside, in_copy = todo.pop()
        fields = event.extra_fields
        if event.name == "comm hook":
            continue
        if within and event.name == f"torch::autograd::{within}":
            inside, nodes = True, nodes + 1
        if not inside:
            pass
        elif isinstance(fields, _ExtraFields_Allocation):
            allocations += fields.alloc_size >= smallest
        elif isinstance(fields, _ExtraFields_TorchOp) and event.name in COPIES and not in_copy:
            tensors = [i for i in fields.inputs if isinstance(i, _TensorMetadata)]
            onto_itself = len(tensors) == 2 and tensors[0].impl_ptr == tensors[1].impl_ptr  # baddbmm_ does, for nothing
            in_copy = not onto_itself and any(tuple(t.sizes) in shapes for t in tensors)
            copies += in_copy
        todo += [(child, inside, in_copy) for child in event.children]
    return {"copies": copies, "allocations": allocations} | ({"nodes": nodes} if within else {})
