"""Trains a layer on the CUDA driver that does nothing: `null_training.py '{"E": 8, ...}'`. Prints as JSON the names of
the kernels that Triton compiled meanwhile, and the number of those that it found in its cache.
"""

import json
import sys

import torch
from triton import knobs

import fusedmlp
from bench.host.cost import as_on_a_gpu

DEFAULTS = {
    "E": 8,
    "H": 64,
    "F": 64,
    "K": 2,
    "tokens": [33],
    "dtype": "bfloat16",
    "activation": {"name": "swiglu"},
    "bias": False,
    "packed": True,
    "recipe": None,
    "batch_invariant": False,
    "delay": False,
    "fuse": False,
    "probs": "float32",
    "main_grad": "float32",
}


def train(given):
    """Two steps of two micro-batches: of sorted rows with counts on the device or on the host, and of tokens."""
    o = DEFAULTS | given
    dtype, probs_dtype = getattr(torch, o["dtype"]), getattr(torch, o["probs"])
    activation = fusedmlp.Activation(**o["activation"])
    # fmt: off
    module = fusedmlp.GroupedMLP(o["E"], o["H"], o["F"], activation=activation, bias=o["bias"], packed=o["packed"],
                                 recipe=o["recipe"], batch_invariant=o["batch_invariant"], dtype=dtype,
                                 delay_wgrad=o["delay"], impl="triton")
    # fmt: on
    if o["delay"]:
        module.wgrad_queue.fuse_microbatches = o["fuse"]
    weights = [p for name, p in module.named_parameters() if "weight" in name]
    buffer = fusedmlp.MainGradBuffer(weights, dtype=getattr(torch, o["main_grad"])) if o["main_grad"] else None
    for T in o["tokens"]:
        for form in ("device", "host", "tokens"):
            for _ in range(2):
                for _ in range(2):
                    rows = T if form == "tokens" else T * o["K"] + 1
                    x = torch.randn(rows, o["H"], dtype=dtype, requires_grad=True)
                    if form == "tokens":
                        ids = torch.arange(T * o["K"]).view(T, o["K"]) % o["E"]
                        probs = torch.rand(T, o["K"], dtype=probs_dtype, requires_grad=True)
                        y = module.forward_tokens(x, ids, probs)
                    else:
                        with_host_counts(form == "host")
                        counts = torch.full((o["E"],), rows // o["E"])
                        probs = torch.rand(rows, dtype=probs_dtype, requires_grad=True)
                        y = module(x, counts, probs)
                    y.backward(torch.ones_like(y))
                module.backward_dw()
                for p in module.parameters():
                    p.grad = None
    del buffer


def with_host_counts(on_host):
    """Let `calls.offsets`, as `as_on_a_gpu` replaces it, make first rows on the device, or as of counts on the host."""
    calls.offsets = original if on_host else replaced


if __name__ == "__main__":
    torch.set_num_threads(1)
    from fusedmlp import calls

    compiled, found = [], []

    def listen(*, src, cache_hit, **_):
        (found if cache_hit else compiled).append(src.name)

    original = calls.offsets
    with as_on_a_gpu(), knobs.compilation.scope():
        replaced = calls.offsets
        knobs.compilation.listener = listen
        train(json.loads(sys.argv[1]))
    print(json.dumps({"compiled": compiled, "found": len(found)}))
