"""`python -m fusedmlp memory`: its formulas, compared with what PyTorch allocates on the CPU."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from fusedmlp import GroupedMLP, LoRA, MainGradBuffer, moe_experts, quantize_weights
from fusedmlp.__main__ import main
from fusedmlp.memory import Layer, modes

SIZES = {"experts": 4, "hidden": 128, "ffn": 192, "tokens": 16, "top_k": 2, "micro_batches": 3}


def plain(x, ids, top_k_weights, fc1, fc2):
    """The layer without fusedmlp, as the command describes it."""
    order = ids.flatten().argsort(stable=True)
    tokens, ends = order // ids.shape[1], ids.flatten().bincount(minlength=fc1.shape[0]).cumsum(0).int()
    h = F.grouped_mm(x.index_select(0, tokens), fc1.mT, offs=ends)
    gate, linear = h.chunk(2, -1)
    act = F.silu(gate) * linear * top_k_weights.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, F.grouped_mm(act, fc2.mT, offs=ends))


def add_to_main_grad(param):
    param.main_grad.add_(param.grad)
    param.grad = None


def measured(mode, dtype):
    """Bytes by the names of `Bytes`, after the last of the micro-batches."""
    torch.manual_seed(0)
    E, H, F1, T, K, micro_batches = SIZES.values()
    fused, to_main = not mode.startswith("plain"), "main_grad" in mode
    option = mode if mode in ("grad", "off") else "auto"
    module = GroupedMLP(E, H, F1, dtype=dtype, accumulate_wgrad=option, delay_wgrad="delayed" in mode)
    params = [*module.parameters()]
    if to_main and fused:
        MainGradBuffer(params)
    elif to_main:
        for param in params:
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
            param.register_post_accumulate_grad_hook(add_to_main_grad)
    ids = torch.tensor([[t % 2, 2 + t % 2] for t in range(T)])
    x, probs = torch.randn(T, H, dtype=dtype), torch.rand(T, K, dtype=torch.float32 if fused else dtype)
    x.requires_grad_()
    probs.requires_grad_()
    own, smallest = {p.untyped_storage().data_ptr() for p in params}, min(p.nbytes for p in params)
    held = []  # by the queue
    for _ in range(micro_batches):
        saved = {}

        def pack(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module.forward_tokens(x, ids, probs) if fused else plain(x, ids, probs, *params)
        activations = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in own)
        dy = torch.randn_like(y)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            y.backward(dy)
        live = temporaries = 0
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            if abs(event.nbytes()) >= smallest:
                live += event.nbytes()
                temporaries = max(temporaries, live)
    if module.wgrad_queue is not None:
        operands = {id(t): t for d in module.wgrad_queue._pending for t in d.operands if t is not None}
        held = [t.nbytes for t in operands.values()]
        module.wgrad_queue.clear()
    gradients = sum((p.main_grad if to_main else p.grad).nbytes for p in params)
    weights = sum(p.nbytes for p in params)
    return {
        "weights": weights,
        "gradients": gradients,
        "temporaries": temporaries,
        "activations": activations + sum(held),
    }


@pytest.mark.parametrize("mode", ["plain, .grad", "plain, main_grad", "grad", "main_grad", "main_grad, delayed", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_formulas_are_what_is_allocated(mode, dtype):
    (found,) = (each for each in modes(Layer(**SIZES, dtype=dtype, recipe=None)) if each.mode == mode)
    expected = measured(mode, dtype)
    got = {name: getattr(found, name) for name in expected}
    if dtype is torch.bfloat16 and mode in ("main_grad", "plain, main_grad"):
        # On the CPU alone, 16-bit products and gradients are added to float32 through scratch memory.
        del got["temporaries"], expected["temporaries"]
    assert got == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("mode", ["plain, PEFT", "LoRA"])
def test_formulas_of_adapters_are_what_is_allocated(mode):
    torch.manual_seed(0)
    E, H, F1, T, K, _ = SIZES.values()
    (found,) = (each for each in modes(Layer(**SIZES, dtype=torch.float32, lora_rank=2)) if each.mode == mode)
    weights = torch.randn(E, 2 * F1, H), torch.randn(E, H, F1)
    adapters = [(torch.randn(E, 2, w.shape[2]), torch.randn(E, w.shape[1], 2)) for w in weights]
    leaves = [factor.requires_grad_() for adapter in adapters for factor in adapter]
    x, probs = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    ids = torch.tensor([[t % 2, 2 + t % 2] for t in range(T)])
    own, saved = {t.untyped_storage().data_ptr() for t in (*weights, *leaves)}, {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        if mode == "LoRA":
            loras = [LoRA(*adapter) for adapter in adapters]
            y = moe_experts(x, ids, probs, *weights, fc1_lora=loras[0], fc2_lora=loras[1])
        else:
            y = plain(x, ids, probs, *(torch.baddbmm(w, B, A) for w, (A, B) in zip(weights, adapters, strict=True)))
    smallest = weights[1].nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        y.backward(torch.ones_like(y))
    sizes = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert max(size if size >= smallest else 0 for size in sizes) == found.temporaries
    assert found.weights == sum(t.nbytes for t in (*weights, *leaves))
    assert found.gradients == sum(t.grad.nbytes for t in leaves)
    kept = sum(size for address, size in saved.items() if address not in own)
    assert found.copies + found.activations == pytest.approx(kept, rel=0.01)


def test_the_first_micro_batch_needs_no_temporary_in_grad():
    layer = Layer(**SIZES | {"micro_batches": 1}, dtype=torch.bfloat16, recipe=None)
    assert {each.mode for each in modes(layer) if each.temporaries} == {"plain, main_grad"}


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_copies_in_8_bits(recipe):
    layer = Layer(4, 128, 256, 128, 2, 1, torch.bfloat16, recipe)
    module = GroupedMLP(4, 128, 256, dtype=torch.bfloat16)
    made = quantize_weights(module.fc1.weight, module.fc2.weight, recipe)
    copies = sum(t.nbytes for each in (made.fc1, made.fc2) for t in each)
    assert {each.copies for each in modes(layer) if not each.mode.startswith("plain")} == {copies}
    few = layer._replace(tokens=8)  # with fewer than 64 rows an expert, the layer computes in bf16
    assert {each.copies for each in modes(few)} == {0}
    wide = layer._replace(dtype=torch.float32, recipe="bf16")
    assert {each.copies for each in modes(wide)} == {sum(2 * p.numel() for p in module.parameters())}


def test_the_command(capsys):
    arguments = ["memory", "--experts", "64", "--hidden", "4096", "--ffn", "1024", "--tokens", "32768", "--top-k", "4"]
    assert main([*arguments, "--micro-batches", "4"]) == 0
    out = capsys.readouterr().out
    lines = {line[:18].strip(): line[18:].split() for line in out.splitlines()[3:]}
    # 64 * 3 * 4096 * 1024 weights, of 2 bytes: 1536 MiB.
    assert lines["main_grad"][:4] == ["1,536.0", "0.0", "3,072.0", "0.0"]
    assert lines["plain, .grad"][:4] == ["1,536.0", "0.0", "1,536.0", "1,024.0"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["mode"] for each in found] == [*lines]
    assert all(each["total"] == sum(n for key, n in each.items() if key not in ("mode", "total")) for each in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe mxfp8 --ffn 1000", "memory: fc1_weight: expected multiples of 32 features"),
        ("--recipe bf16 --dtype float16", "memory: --dtype: expected float32 or that of --recipe bf16; got float16"),
    ],
)
def test_what_there_is_no_such_layer_for(arguments, message, capsys):
    assert main(["memory", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
