"""Uses of a layer and its gradients, and the outcome in each mode: right, or refused by a message. Tests check all.

    PYTHONPATH=.:tests python -m support.systems

writes this table, and that of support/frameworks.py, into docs/systems.md. Rows with a function are run by
contract/test_systems.py: the function gets a `Step`, runs forward and backward in its way, and returns None, or the
gradients that it was handed; `seeds` are the micro-batches whose gradients should be there then. Rows without a
function belong to the test that they name.
"""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.frameworks import COLUMNS, FRAMEWORKS, Framework
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedmlp

# Name: (accumulate_wgrad, whose main_grad parameters have, if any, whether weight gradients are delayed).
MODES = {
    "auto": ("auto", "", False),
    "grad": ("grad", "", False),
    "off": ("off", "", False),
    "buffer": ("auto", "buffer", False),
    "main_grad": ("main_grad", "owner", False),
    "delayed, .grad": ("off", "", True),
    "delayed, buffer": ("auto", "buffer", True),
    "delayed, main_grad": ("main_grad", "owner", True),
}
BUFFER, MAIN = ("buffer", "delayed, buffer"), ("main_grad", "delayed, main_grad")
DELAYED = tuple(mode for mode in MODES if mode.startswith("delayed"))
NOT_A_LEAF = "through which only a returned gradient flows back: use accumulate_wgrad='off'"
PAGE = Path(__file__).parents[2] / "docs" / "systems.md"
COUNTS = [3, 0, 2]  # rows of the layer's experts
SCALE = 1024.0  # of the GradScaler


@dataclass(frozen=True)
class System:
    name: str
    run: Callable[[Step], Sequence[Tensor] | None] | None = None
    seeds: tuple[int, ...] = (1,)
    refused: dict[str, str] = field(default_factory=dict)  # mode: part of the message
    where: str = ""  # the place of the gradients, if not the mode's
    refused_late: bool = False  # only after a backward, or part of one
    digits: torch.dtype | None = None  # that the layer computes in, if not float32

    def answer(self, mode: str) -> str:
        return f"refused: {self.refused[mode]}" if mode in self.refused else "right"


SYSTEMS: list[System] = []


def system(name: str, *, refused: dict[str | tuple[str, ...], str] | None = None, **fields: Any) -> Callable[..., Any]:
    """Register a row; keys of `refused` are modes, tuples of modes, or "all"."""
    messages = {}
    for modes, message in (refused or {}).items():
        for mode in MODES if modes == "all" else [modes] if isinstance(modes, str) else modes:
            messages[mode] = message

    def register(run: Callable[..., Any] | None) -> Callable[..., Any] | None:
        SYSTEMS.append(System(name, run, refused=messages, **fields))
        return run

    return register


class Step:
    """A `GroupedMLP` in one mode, whose gradients do not start from zero, and one batch for it.

    `make_layer` is the class of contract/conftest.py: it makes the numbers and their float64 reference.
    """

    def __init__(self, make_layer: Any, mode: str, packed: bool) -> None:
        self.accumulate, self.memory, delayed = MODES[mode]
        self.layer = make_layer("mlp", packed)
        self.queue = fusedmlp.WgradQueue() if delayed else None
        self.module = fusedmlp.GroupedMLP(3, 4, 5, packed=packed, accumulate_wgrad=self.accumulate)
        self.module.wgrad_queue = self.queue
        for mine, made in zip(self.module.parameters(), self.layer.params, strict=True):
            mine.data.copy_(made.data)
        self.adopt(self.module)
        self.params = self.layer.params
        self.buffer = attach(self.params, self.memory)
        generator = torch.Generator().manual_seed(9)
        for param, place in zip(self.params, self.places(), strict=True):
            place.copy_(torch.randn(param.shape, generator=generator))
        self.before = [t.clone() for t in self.places()]
        self.x, self.dy = self.layer.batch(1)

    def adopt(self, module: nn.Module) -> list[Tensor]:
        """Run with the weights of this module from now on, and return them."""
        self.layer.use(list(module.parameters()))
        return self.layer.params

    def places(self, params: Sequence[Tensor] = ()) -> list[Tensor]:
        """Where gradients of the layer, or of other parameters, belong in this mode."""
        return [p.main_grad if self.memory == "owner" else p.grad for p in params or self.params]

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x, accumulate_wgrad=self.accumulate, wgrad_queue=self.queue)

    def forward(self) -> Tensor:
        return self(self.x)

    def backward(self, seed: int = 1) -> None:
        x, dy = self.layer.batch(seed)
        self(x).backward(dy)

    def run_queue(self) -> None:
        if self.queue is not None:
            self.queue.run()

    def start_from_zero(self) -> None:
        for place, before in zip(self.places(), self.before, strict=True):
            place.zero_()
            before.zero_()


def attach(params: Sequence[Tensor], memory: str, start: float = 0.0) -> fusedmlp.MainGradBuffer | None:
    """Give parameters gradients to add to: `.grad`, in the memory of a "buffer", or the main_grad of an "owner"."""
    for param in params:
        if memory == "owner":
            param.main_grad, param.grad_added_to_main_grad = torch.full_like(param, start), False
        else:
            param.grad = torch.full_like(param, start)
    return fusedmlp.MainGradBuffer(params) if memory == "buffer" else None


# Ways to ask for gradients


@system("`torch.autograd.grad(y, weights)`", where="handed over; nothing else is touched")
def autograd_grad(step):
    return torch.autograd.grad(step.forward(), step.layer.params, step.dy)


@system("`torch.autograd.grad` of `GradientEdge`s", where="handed over; nothing else is touched")
def grad_of_edges(step):
    return torch.autograd.grad(step.forward(), [get_gradient_edge(p) for p in step.layer.params], step.dy)


@system("`backward(inputs=weights)`")
def backward_inputs(step):
    step.forward().backward(step.dy, inputs=step.layer.params)


@system("`backward(inputs=[x])`", seeds=(), where="nothing is touched, and no weight gradient computed")
def backward_input_x(step):
    step.x.requires_grad_()
    step.forward().backward(step.dy, inputs=[step.x])
    assert step.x.grad.count_nonzero() > 0


@system("`retain_graph=True`, backward twice", seeds=(1, 1))
def retain_graph(step):
    y = step.forward()
    y.backward(step.dy, retain_graph=True)
    y.backward(step.dy)


@system("tied weights: two layers, one backward", seeds=(1, 2))
def tied(step):
    (x1, dy1), (x2, dy2) = step.layer.batch(1), step.layer.batch(2)
    torch.autograd.backward([step(x1), step(x2)], [dy1, dy2])


@system("`backward(create_graph=True)`")
def create_graph(step):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True", UserWarning)
        step.forward().backward(step.dy, create_graph=True)


@system("double backward", refused={"all": "double backward (create_graph=True, then differentiating the gradients)"})
def double_backward(step):
    step.x = step.x.nan_to_num().requires_grad_()
    (dx,) = torch.autograd.grad(step.forward(), [step.x], step.dy, create_graph=True)
    dx.square().sum().backward()


@system(
    "`is_grads_batched=True`, `jacobian(vectorize=True)`",
    refused={"all": "a backward under vmap (autograd.grad(..., is_grads_batched=True), jacobian(vectorize=True))"},
)
def batched(step):
    return torch.autograd.grad(step.forward(), step.layer.params, step.dy.expand(2, -1, -1), is_grads_batched=True)


@system("`torch.func.grad`, `vjp`, `vmap`", refused={"all": "inside a torch.func transform (grad, vmap, jvp, ...)"})
def func_grad(step):
    return torch.func.grad(lambda x: step(x).sum())(step.x)


@system("forward-mode AD", refused={"all": "under forward-mode AD (torch.autograd.forward_ad, torch.func.jvp)"})
def forward_mode(step):
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # torch's own
        step(torch.autograd.forward_ad.make_dual(step.x, torch.ones_like(step.x)))


@system("`torch.func.functional_call`")
def functional_call(step):
    arguments = (step.x, COUNTS, step.layer.probs)
    torch.func.functional_call(step.module, dict(step.module.named_parameters()), arguments).backward(step.dy)


@system(
    "a program of `torch.export`",
    refused={DELAYED: "expected none, as a graph cannot put its GEMMs off"},
    where="handed over: programs know no `main_grad`",
)
def exported(step):
    arguments = (step.x, torch.tensor(COUNTS), step.layer.probs)
    program = torch.export.export(step.module, arguments, strict=False).module()
    return torch.autograd.grad(program(*arguments), list(program.parameters()), step.dy)


# Ways to run forward again, or to keep its tensors elsewhere


def run_checkpointed(step, *use_reentrant):
    """Checkpoints around each other, the innermost first."""
    function = step
    for reentrant in use_reentrant:
        function = partial(checkpoint, function, use_reentrant=reentrant)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        function(step.x.requires_grad_()).backward(step.dy)


@system("checkpoint, `use_reentrant=False`")
def checkpointed(step):
    run_checkpointed(step, False)


@system("checkpoint, `use_reentrant=True`")
def checkpointed_reentrant(step):
    run_checkpointed(step, True)


@system("checkpoints in checkpoints, of both kinds")
def checkpointed_nested(step):
    run_checkpointed(step, False, True, False)


@system("selective checkpoint, recomputing")
def selective(step):
    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    checkpoint(step, step.x.requires_grad_(), use_reentrant=False, context_fn=policy).backward(step.dy)


@system("selective checkpoint, keeping")
def selective_keeping(step):
    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    checkpoint(step, step.x.requires_grad_(), use_reentrant=False, context_fn=policy).backward(step.dy)


@system("`save_on_cpu`, saved-tensor hooks")
def offloaded(step):
    with save_on_cpu():
        y = step.forward()
    y.backward(step.dy)


@system("`allow_mutation_on_saved_tensors`")
def mutable(step):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        step.forward().backward(step.dy)


# Ways to change how backward runs


@system("anomaly mode")
def anomaly(step):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled", UserWarning)
        detect = torch.autograd.detect_anomaly(check_nan=True)
    with detect:
        step.backward()


@system("compiled autograd")
def compiled(step):
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        step.backward()


@system(
    "compiled autograd, weights used twice",
    seeds=(1, 2),
    refused={("main_grad", *DELAYED): "must be Tensor, not NoneType"},
    refused_late=True,
    where="refused amid backward, by PyTorch: zero the gradients before going on",
)
def compiled_twice(step):
    (x1, dy1), (x2, dy2) = step.layer.batch(1), step.layer.batch(2)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        try:
            torch.autograd.backward([step(x1), step(x2)], [dy1, dy2])
        except TypeError:
            if step.queue is not None:
                step.queue.clear()
            raise


@system("backward in another thread")
def other_thread(step):
    y = step.forward()
    thread = threading.Thread(target=y.backward, args=(step.dy,))
    thread.start()
    thread.join()


@system("forward and backward in two threads at once", seeds=(1, 2))
def two_threads(step):
    threads = [threading.Thread(target=step.backward, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@system(
    "post-accumulate-grad hooks, an optimizer in backward",
    refused={DELAYED: "the parameter has a post-accumulate-grad hook, which backward"},
)
def post_accumulate_hook(step):
    seen = []
    for param in step.layer.params:
        param.register_post_accumulate_grad_hook(seen.append)
    step.backward()
    assert {id(p) for p in seen} == {id(p) for p in step.layer.params}


@system(
    "tensor hooks on weights (`register_hook`)",
    refused={("main_grad", *DELAYED): "use register_post_accumulate_grad_hook, or accumulate_wgrad='off'"},
)
def tensor_hook(step):
    for param in step.layer.params:
        param.register_hook(lambda grad: grad.clone())
    step.backward()


@system("`torch.no_grad()`, `torch.inference_mode()` around forward", seeds=(), where="no gradient")
def without_grad(step):
    with torch.no_grad():
        y = step.forward()
    with torch.inference_mode():
        assert torch.equal(step.forward(), y)


@system("`torch.no_grad()` around backward")
def backward_without_grad(step):
    y = step.forward()
    with torch.no_grad():
        y.backward(step.dy)


@system("`torch.inference_mode()` around backward and around the queue", seeds=(1, 1))
def backward_in_inference_mode(step):
    for _ in range(2):
        y = step.forward()
        with torch.inference_mode():
            y.backward(step.dy)
            step.run_queue()
        if step.memory == "owner":  # so that the next backward makes a new dummy
            for param in step.layer.params:
                param.grad = None


@system("x made in `torch.inference_mode()`", refused={"all": "Inference tensors cannot be saved for backward."})
def inference_input(step):
    with torch.inference_mode():
        x = step.x.clone()
    step(x)


@system("autocast around forward and backward", where="computed in bf16", digits=torch.bfloat16)
def autocast(step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step.backward()


@system("x that autocast made bf16, fp32 weights", where="computed in bf16", digits=torch.bfloat16)
def autocast_input(step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = step(torch.nn.functional.linear(step.x, torch.eye(4)))
    y.backward(step.dy.bfloat16())


@system("x in bf16, fp32 weights, without autocast", refused={"all": 'recipe="bf16" or autocast casts float32'})
def bf16_input(step):
    step(step.x.bfloat16())


@system(
    "`clip_grad_norm_`, `GradScaler`",
    refused={MAIN: "more than one element of the written-to tensor refers to a single memory location"},
    refused_late=True,
    where="with an owner's main_grad, `.grad` is a zero dummy",
)
def clip_and_unscale(step):
    step.start_from_zero()
    optimizer = torch.optim.SGD(step.layer.params, lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    step.forward().backward(scaler.scale(step.dy))
    step.run_queue()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(step.layer.params, 1e9)
    scaler.step(optimizer)
    scaler.update()


# Kinds of weights


class Labelled(torch.Tensor):
    """A subclass that changes nothing."""


@system("tensor subclasses without `__torch_dispatch__`", where="`.grad` of the subclass's parameter")
def subclass(step):
    return run_with_weights(step, [nn.Parameter(p.detach().as_subclass(Labelled)) for p in step.layer.params])


def run_with_weights(step, weights):
    """Run forward and backward with other weights; return their gradients."""
    step.layer.use(weights)
    if step.memory == "owner":
        attach(weights, "owner")
    return run_and_take(step, weights)


def run_and_take(step, weights):
    step.backward()
    step.run_queue()
    return step.places(weights)


@system("tensor subclasses with `__torch_dispatch__`", refused={"all": "expected a plain tensor; got a TwoTensor"})
def dispatching_subclass(step):
    run_with_weights(step, [nn.Parameter(TwoTensor(p.detach(), p.detach().clone())) for p in step.layer.params])


@contextmanager
def one_rank() -> Iterator[Any]:
    """A device mesh of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield dist.init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


def distributed(mesh, tensor):
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor.detach(), mesh, [Shard(0)])


@system("DTensor weights", refused={"all": "of a DTensor, pass .to_local()"})
def dtensor(step):
    with one_rank() as mesh:
        run_with_weights(step, [nn.Parameter(distributed(mesh, p)) for p in step.layer.params])


@system("DTensor x", refused={"all": "x: expected a plain tensor; got a DTensor"})
def dtensor_input(step):
    with one_rank() as mesh:
        step(distributed(mesh, step.x))


@system(
    "DTensor main_grad or `.grad`",
    refused={
        MAIN: "expected main_grad to be a plain tensor; got a DTensor",
        DELAYED[:2]: "expected .grad to be a plain tensor; got a DTensor",
        ("auto", "grad", "off", "buffer"): "got mixed torch.Tensor and DTensor",
    },
)
def dtensor_target(step):
    with one_rank() as mesh:
        for param in step.layer.params:
            setattr(param, "main_grad" if step.memory == "owner" else "grad", distributed(mesh, param))
        step.backward()


@system(
    "`.to_local()` of DTensor weights",
    refused={MAIN: NOT_A_LEAF},
    where="`.grad` of the DTensor, a DTensor; not delayed",
)
def to_local(step):
    with one_rank() as mesh:
        weights = [nn.Parameter(distributed(mesh, p)) for p in step.layer.params]
        step.layer.use([w.to_local() for w in weights])
        step.backward()
        return [w.grad.to_local() for w in weights]


@system("`nn.utils.parametrize`", refused={MAIN: NOT_A_LEAF}, where="`.grad` of the original; not delayed")
def parametrized(step):
    class Same(nn.Module):
        def forward(self, weight):
            return weight + 0

    originals = step.layer.params
    for fc in (step.module.fc1, step.module.fc2):
        for name, _ in list(fc.named_parameters()):
            parametrize.register_parametrization(fc, name, Same())
    assert {id(p) for p in step.module.parameters()} == {id(p) for p in originals}
    step.module(step.x, COUNTS, step.layer.probs).backward(step.dy)


@system("`copy.deepcopy` of a module", refused={MAIN: "expects a main_grad attribute"}, where="`.grad` of the copy")
def deepcopied(step):
    return run_and_take(step, step.adopt(copy.deepcopy(step.module)))


@system(
    "pickling a module, `torch.save(module)`",
    refused={BUFFER: "call buffer.detach()"},
    where="of the copy, which has an owner's main_grad of its own",
)
def pickled(step):
    return run_with_weights(step, step.adopt(pickle.loads(pickle.dumps(step.module))))


@system(
    "copying or pickling a module whose queue is not empty",
    seeds=(1, 1),
    refused={DELAYED: "expected an empty queue to be copied or pickled"},
    refused_late=True,
)
def copied_with_queue(step):
    step.backward()
    try:
        copy.deepcopy(step.module)
    finally:
        step.run_queue()
    step.backward()


@system("`module.to(dtype)`")
def to_dtype(step):
    step.module.to(torch.bfloat16)
    step.layer.dtype, step.layer.probs = torch.bfloat16, step.layer.probs.bfloat16()
    step.backward()


@system("`load_state_dict()`")
def loaded(step):
    step.module.load_state_dict({name: 2 * tensor for name, tensor in step.module.state_dict().items()})
    step.backward()


@system(
    "`load_state_dict(assign=True)`",
    refused={BUFFER + MAIN: "load_state_dict(assign=True): expected parameters without main_grad"},
    where="`.grad` of the new parameters",
)
def assigned(step):
    step.module.load_state_dict({name: 2 * t for name, t in step.module.state_dict().items()}, assign=True)
    return run_and_take(step, step.adopt(step.module))


@system(
    "`torch.utils.swap_tensors`",
    refused={BUFFER: "Cannot swap t1 because it has weakref associated with it", MAIN: "expects a main_grad attribute"},
    where="`.grad`, empty after the swap",
)
def swapped(step):
    for param in step.layer.params:
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
    step.backward()
    step.before = [torch.zeros_like(b) for b in step.before]


# Rows of several processes, which their own tests check

FSDP2 = "FSDP2 (fully_shard) reduces this parameter's .grad when backward ends, and would miss "
system(
    "FSDP2 (`fully_shard`), 1 and 2 ranks",
    refused={
        "main_grad": FSDP2 + "one in main_grad",
        DELAYED: FSDP2 + "a delayed gradient",
        BUFFER: "expected a plain tensor; got a DTensor (FSDP2 reduces .grad",
    },
    where="reduced `.grad`; see [fsdp2.md](fsdp2.md)",
)(None)


system(
    "`torch.distributed.pipelining`: GPipe, 1F1B, zero bubbles, ZBV, DualPipeV",
    where="`.grad`, also beside an owner's main_grad: add them up (`scale_grads=True` divides `.grad` alone)",
)(None)


system(
    "`torch.distributed.autograd.backward`, local and remote owners",
    where="in the context; nothing else is touched, and nothing delayed",
)(None)


# The document


def table(columns: dict[str, str], rows: Sequence[System | Framework]) -> str:
    """Rows in Markdown: right everywhere, refused everywhere by one message, and others. `columns`: headings."""
    of_cells = [column for column in columns if not hasattr(rows[0], column)]
    messages: list[str] = []

    def cell(row: System | Framework, column: str) -> str:
        if hasattr(row, column):
            return str(getattr(row, column))
        if column not in row.refused:
            return "right"
        if row.refused[column] not in messages:
            messages.append(row.refused[column])
        return f"[{messages.index(row.refused[column]) + 1}]"

    def lines(heading: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
        return "\n".join(f"| {' | '.join(each)} |" for each in (heading, ["---"] * len(heading), *cells))

    def one_message(row: System | Framework) -> bool:
        return set(row.refused) == set(of_cells) and len(set(row.refused.values())) == 1

    fields = [column for column in columns if column not in of_cells]
    right = [[cell(row, column) for column in fields] for row in rows if not row.refused]
    never = [[row.name, f'"{row.refused[of_cells[0]]}"'] for row in rows if one_message(row)]
    others = [[cell(row, column) for column in columns] for row in rows if row.refused and not one_message(row)]
    named = "\n".join(f"- {name}" for name, *_ in right)
    parts = ["Right in every column:", lines([columns[column] for column in fields], right) if fields[1:] else named]
    if never:
        parts += ["Refused in every column:", lines([columns["name"], "message"], never)]
    parts += ["Others, with the number of the message where they are refused:", lines([*columns.values()], others)]
    return "\n\n".join([*parts, "\n".join(f'{i}. "{m}"' for i, m in enumerate(messages, 1))])


def page(text: str) -> str:
    """The document with both tables between their marks."""
    modes = {mode: f"`{mode}`" if mode == MODES[mode][0] else mode for mode in MODES}
    tables = {
        "systems": table({"name": "system"} | modes | {"where": "gradients"}, SYSTEMS),
        "frameworks": table({"name": "system"} | {column: column for column in COLUMNS}, [*FRAMEWORKS.values()]),
    }
    between = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.S)
    return between.sub(lambda m: f"<!-- {m[1]} -->\n\n{tables[m[1]]}\n\n<!-- end -->", text)


if __name__ == "__main__":
    from support import systems  # the registry, not this copy of it

    PAGE.write_text(systems.page(PAGE.read_text()))
