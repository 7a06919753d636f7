"""Loops of other libraries around a tiny MoE, without a buffer and with one: right, or refused by a message.

A row is a function of a `Cell`. It trains with the library's own loop for a few steps, each of several micro-batches
where the library accumulates, and returns the parameters. `run` calls it with plain PyTorch experts first, then with a
`GroupedMLP` in every column, and compares what the steps did to the parameters. Rows run in processes of their own
(integrations/test_frameworks.py), so that nothing that a library registers or patches reaches another test.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedmlp
from bench.oracle import reference

COLUMNS = ("auto, no buffer", "buffer")
# Libraries that only these tests need, in a folder of their own: `make .frameworks/.ready`.
LIBRARIES = Path(__file__).parents[2] / ".frameworks" / "site-packages"
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.5
TOKENS, TOP_K, EXPERTS, H, F = 5, 2, 3, 8, 6
SGD = {"lr": 0.5, "momentum": 0.9}
BF16 = torch.finfo(torch.bfloat16).eps
ADAM = {"lr": 0.1, "eps": 0.1}  # with this epsilon, a gradient that is twice too large shows


@dataclass(frozen=True)
class Framework:
    name: str
    run: Callable[[Cell], dict[str, Tensor]]
    ranks: int = 1
    refused: dict[str, str] = field(default_factory=dict)  # column: part of the message
    digits: float = torch.finfo(torch.float32).eps  # relative precision of a step
    library: bool = False  # needs LIBRARIES; other rows run without, since some libraries import any that they find
    heavy: bool = False  # seconds to import: not part of a quick run

    @property
    def tolerance(self) -> float:
        """The largest error, relative to what training did to a parameter: half of the digits."""
        return self.digits**0.5


FRAMEWORKS: dict[str, Framework] = {}


def framework(name: str, **fields: Any) -> Callable[..., Any]:
    """Register a row."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        FRAMEWORKS[name] = Framework(name, run, **fields)
        return run

    return register


# The model and its batches


class PlainMLP(fusedmlp.GroupedMLP):
    """The same parameters, and a loop over experts in plain PyTorch. `doubled` counts fc2's gradient twice."""

    doubled = False

    def forward(self, x, tokens_per_expert, probs):
        outputs, counts = [], tokens_per_expert.tolist()
        for rows, p, fc1, fc2 in zip(
            x.split(counts), probs.split(counts), self.fc1(None, None).weight, self.fc2(None, None).weight, strict=True
        ):
            y = reference.expert(rows, fc1, fc2).y
            outputs.append(p[:, None] * (2 * y - y.detach() if self.doubled else y))
        return torch.cat(outputs)


class Model(nn.Module):
    """Returns the loss. Experts are those that the batch names, weighted by a router."""

    def __init__(self, experts, hidden):
        super().__init__()
        self.inner = nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x, ids, target):
        x = self.inner(x.to(self.inner.weight.dtype))
        weights = self.router(x).softmax(-1).gather(1, ids)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten()[:, None] == torch.arange(EXPERTS)).sum(0)
        rows = self.experts(x[order // TOP_K], counts, weights.flatten()[order])
        y = torch.zeros_like(x).index_add(0, order // TOP_K, rows)
        return (y - target).float().square().mean()


def batch(step: int, micro_batch: int, hidden: int = H) -> dict[str, Tensor]:
    """Arguments of `Model`, another on each rank; expert 1 has no tokens in one of three steps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro_batch)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    if step == 1:
        ids[:] = torch.tensor([0, 2])
    x, target = (torch.randn(TOKENS, hidden, generator=generator) for _ in range(2))
    return {"x": x, "ids": ids, "target": target}


def state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, by name."""
    return {name: param.detach().clone() for name, param in module.named_parameters()}


class Cell:
    """A column as rows see it: "plain", "doubled" (plain, and wrong), or one of COLUMNS."""

    def __init__(self, column: str) -> None:
        self.column, self.plain = column, column in ("plain", "doubled")
        self.buffer: fusedmlp.MainGradBuffer | None = None
        self.trained: Any = None
        self.before: dict[str, Tensor] = {}

    def model(self, *, hidden: int = H, ffn: int = F, packed: bool = True, dtype: Any = torch.float32) -> Model:
        torch.manual_seed(3)
        kind = PlainMLP if self.plain else fusedmlp.GroupedMLP
        model = Model(kind(EXPERTS, hidden, ffn, packed=packed, dtype=dtype), hidden).to(dtype)
        model.experts.doubled = self.column == "doubled"
        for param in model.parameters():
            param.data.copy_(torch.randn(param.shape) * param.shape[-1] ** -0.5)
        return self.starts_as(model)

    def starts_as(self, model: Any) -> Any:
        """Remember the parameters, to compare those after training with them."""
        self.trained, self.before = model, state(model)
        return model

    def attach(self, model: nn.Module) -> None:
        """Give the trained parameters a buffer, in the column that has one."""
        if self.column == "buffer":
            self.buffer = fusedmlp.MainGradBuffer([param for param in model.parameters() if param.requires_grad])


# Loops that a user writes


def plain_loop(model, optimizer, steps=range(STEPS), hidden=H, clip=None):
    """Train; `clip` is the model's own, if it has one."""
    clip = clip or partial(nn.utils.clip_grad_norm_, model.parameters())
    for step in steps:
        for i in range(MICRO_BATCHES):
            (model(**batch(step, i, hidden)) / MICRO_BATCHES).backward()
        clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@framework("fused optimizers: `torch.optim.AdamW(fused=True)`")
def fused_optimizer(cell, dtype=torch.float32):
    model = cell.model(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    cell.attach(model)
    return plain_loop(model, optimizer)


@framework("`torch.optim.AdamW(fused=True)`, bf16 weights", digits=BF16)
def fused_optimizer_bf16(cell):
    return fused_optimizer(cell, torch.bfloat16)


@framework("Muon: `torch.optim.Muon`, one tensor per expert")
def muon(cell):
    model = cell.model(packed=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    cell.attach(model)
    return plain_loop(model, optimizer)


@framework("8-bit optimizer: torchao's `AdamW8bit`", digits=2**-12, library=True)
def eight_bits(cell):
    from torchao.optim import AdamW8bit

    model = cell.model(hidden=32, ffn=64)  # smaller tensors have states of 32 bits
    optimizer = AdamW8bit(model.parameters(), **ADAM)
    cell.attach(model)
    with torch.compiler.set_stance("force_eager"):  # it compiles its update of a parameter
        return plain_loop(model, optimizer, hidden=32)


@framework("L-BFGS: `optimizer.step(closure)`")
def lbfgs(cell):
    model = cell.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    cell.attach(model)

    def closure():
        optimizer.zero_grad()
        loss = sum(model(**batch(0, i)) / MICRO_BATCHES for i in range(MICRO_BATCHES))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return state(model)


@framework("optimizer in backward: a step in each post-accumulate-grad hook")
def in_backward(cell):
    model = cell.model()
    optimizers = {param: torch.optim.SGD([param], **SGD) for param in model.parameters()}
    cell.attach(model)

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for i in range(STEPS):
        model(**batch(i, 0)).backward()
    return state(model)


@framework("distributed checkpoints: `torch.distributed.checkpoint`, saved and loaded between steps")
def distributed_checkpoint(cell, dtype=torch.float32):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with tempfile.TemporaryDirectory() as folder:
        for steps in (range(2), range(2, STEPS)):
            model = cell.model(dtype=dtype)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
            cell.attach(model)
            models, optimizers = get_state_dict(model, optimizer)
            if steps.start:
                dcp.load({"model": models, "optimizer": optimizers}, checkpoint_id=folder)
                set_state_dict(model, optimizer, model_state_dict=models, optim_state_dict=optimizers)
            parameters = plain_loop(model, optimizer, steps)
            models, optimizers = get_state_dict(model, optimizer)
            if not steps.start:
                dcp.save({"model": models, "optimizer": optimizers}, checkpoint_id=folder)
    return parameters


@framework("distributed checkpoints, bf16 weights", digits=BF16)
def distributed_checkpoint_bf16(cell):
    return distributed_checkpoint(cell, torch.bfloat16)


# Libraries with a loop of their own


@framework("Lightning", library=True)
def lightning(cell):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = cell.model()

        def configure_optimizers(self):
            cell.attach(self.model)
            return torch.optim.SGD(self.model.parameters(), **SGD)

        def training_step(self, batch, index):
            return self.model(**batch)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        barebones=True,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP,
    )
    batches = [batch(step, i) for step in range(STEPS) for i in range(MICRO_BATCHES)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return state(module.model)


@framework("Lightning Fabric", library=True)
def fabric(cell, **options):
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1, **options)
    original = cell.model()
    model, optimizer = made.setup(original, torch.optim.SGD(original.parameters(), **SGD))
    cell.attach(original)
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            with made.no_backward_sync(model, enabled=i < MICRO_BATCHES - 1):
                made.backward(model(**batch(step, i)) / MICRO_BATCHES)
        made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return state(original)


@framework('Lightning Fabric, bf16 weights (`precision="bf16-true"`)', library=True, digits=BF16)
def fabric_bf16(cell):
    return fabric(cell, precision="bf16-true")


@framework("Accelerate")
def accelerate(cell):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model = cell.model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), **SGD))
    cell.attach(model)
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch(step, i)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()  # which does nothing before the last micro-batch
                optimizer.zero_grad()
    return state(model)


def tiny_mixtral(cell):
    """Transformers' own model, with the library's experts or its own."""
    from support import transformers_models as models

    implementation = "eager" if cell.plain else "fusedmlp"
    model = models.build("mixtral", implementation, num_experts_per_tok=4)  # all experts: rounding changes no choice
    if cell.column == "doubled":
        count_twice(p for p in models.expert_parameters(model) if p.requires_grad)
    return model


def count_twice(params: Iterable[Tensor]) -> None:
    for param in params:
        param.register_hook(lambda grad: 2 * grad)


def trainer_options(folder):
    from support import transformers_training as training

    return {
        **training.ON_CPU,
        "output_dir": folder,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "max_grad_norm": CLIP,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 0.1,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def attached_when_made(cell, kind):
    """A Trainer that makes the buffer when it makes its optimizer."""

    class Attached(kind):
        def create_optimizer(self, *args, **kwargs):
            if cell.buffer is None:
                cell.attach(self.model)
            return super().create_optimizer(*args, **kwargs)

    return Attached


def hf_trainer(cell, **options):
    import transformers
    from support import transformers_training as training

    model = cell.starts_as(tiny_mixtral(cell))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(**trainer_options(folder), **options)
        attached_when_made(cell, transformers.Trainer)(model, arguments, train_dataset=training.texts()).train()
    return state(model)


@framework("Transformers' Trainer, fp32", heavy=True)
def trainer_fp32(cell):
    return hf_trainer(cell)


@framework("Transformers' Trainer, bf16 autocast", heavy=True, digits=BF16)
def trainer_bf16(cell):
    return hf_trainer(cell, bf16=True)


@framework("TRL's SFTTrainer", library=True)
def trl(cell):
    import datasets
    import tokenizers
    import transformers
    from support import transformers_training as training
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(64)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )
    texts = datasets.Dataset.from_list([{"input_ids": text["input_ids"].tolist()} for text in training.texts()])
    model = cell.starts_as(tiny_mixtral(cell))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(**trainer_options(folder), max_length=16, bf16=False, gradient_checkpointing=False)
        kind = attached_when_made(cell, SFTTrainer)
        kind(model, arguments, train_dataset=texts, processing_class=tokenizer).train()
    return state(model)


@framework("LoRA on experts: PEFT's `target_parameters`", heavy=True)
def lora(cell):
    from support import transformers_models as models
    from support import transformers_training as training

    model = cell.starts_as(training.with_lora(tiny_mixtral(cell), experts=True))
    trained = [param for param in model.parameters() if param.requires_grad]
    if cell.column == "doubled":
        count_twice(trained[::2])
    optimizer = torch.optim.SGD(trained, **SGD)
    cell.attach(model)
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            ids, dy = models.batch(seed=10 * step + i)
            (model(ids).logits * dy).mean().backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


# Two ranks


@framework(
    "FSDP1 (`FullyShardedDataParallel`), 2 ranks",
    ranks=2,
    refused={"buffer": "got a FlatParameter of FSDP1 (wrap with use_orig_params=True, "},
)
def fsdp1(cell, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(cell.model(), device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    cell.attach(model)
    plain_loop(model, optimizer, clip=model.clip_grad_norm_)  # over all ranks
    with FullyShardedDataParallel.summon_full_params(model):
        return state(model.module)


@framework("FSDP1, `use_orig_params=True`, 2 ranks", ranks=2)
def fsdp1_original_parameters(cell):
    return fsdp1(cell, use_orig_params=True)


@framework("`torch.compile(DDP(model))`, 2 ranks", ranks=2)
def compiled_ddp(cell):
    from torch.nn.parallel import DistributedDataParallel

    model = cell.model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    cell.attach(model)
    ddp = DistributedDataParallel(model)
    if not cell.plain:
        ddp = torch.compile(ddp, backend="aot_eager")
    plain_loop(ddp, optimizer)
    return state(model)


def deepspeed_loop(cell, stage):
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # or it compiles an all-reduce of its own, for a minute
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    original = cell.model()
    optimizer = torch.optim.SGD(original.parameters(), **SGD)
    cell.attach(original)
    engine, *_ = deepspeed.initialize(
        model=original,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": TOKENS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            engine.backward(engine(**batch(step, i)))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(original.parameters()), enabled=stage == 3):
        return state(original)


@framework("DeepSpeed ZeRO 1, 2 ranks", ranks=2, library=True)
def zero1(cell):
    return deepspeed_loop(cell, 1)


@framework(
    "DeepSpeed ZeRO 3, 2 ranks",
    ranks=2,
    library=True,
    refused={"buffer": "DeepSpeed reduces this parameter's .grad when backward ends, and would miss one in main_grad"},
)
def zero3(cell):
    return deepspeed_loop(cell, 3)


# Running a row


def changes(row: Framework, column: str) -> dict[str, Tensor]:
    """The change of every parameter by training, in float64."""
    cell = Cell(column)
    after = row.run(cell)
    assert after.keys() == cell.before.keys()
    assert (cell.buffer is not None) == (column == "buffer")
    return {name: after[name].double() - before.double() for name, before in cell.before.items()}


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter's change (2-norm)."""
    assert all(tensor.isfinite().all() for tensor in actual.values())
    moved = {name: wanted for name, wanted in expected.items() if wanted.any()}
    assert moved
    assert not any(actual[name].any() for name in expected.keys() - moved.keys())
    return max(float((actual[name] - wanted).norm() / wanted.norm()) for name, wanted in moved.items())


def run(name: str) -> dict[str, Any]:
    """Run a row; return by column the error of the parameters' changes, or the message of the refusal."""
    row, found = FRAMEWORKS[name], {}
    if row.library:
        sys.path.insert(0, str(LIBRARIES))
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="fusedmlp")
    expected = changes(row, "plain")
    for column in ("doubled", *COLUMNS):
        if column in row.refused:
            found[column] = refusal(row, column)
        else:
            found[column] = error(changes(row, column), expected)
    util._run_finalizers(0)  # of tqdm's semaphores, as the process ends without an interpreter's end
    return found


def refusal(row: Framework, column: str) -> str:
    """The message of a loop that is refused, which must have changed no parameter."""
    cell = Cell(column)
    try:
        row.run(cell)
    except (RuntimeError, TypeError, ValueError) as refused:
        left = {name: param for name, param in cell.trained.named_parameters() if name in cell.before}
        moved = [name for name, param in left.items() if is_another(param, cell.before[name])]
        return f"refused after it had changed {moved}" if moved else str(refused)
    return "nothing was refused"


def is_another(param: Tensor, before: Tensor) -> bool:
    """Whether a parameter has changed; a shard, which has another shape, does not count."""
    return param.shape == before.shape and not torch.equal(param, before.to(param.dtype))


def run_alone(name: str, out: str) -> None:
    """Run a row in a process without a process group."""
    Path(out).write_text(json.dumps(run(name)))
