"""Gradients of bf16 weights accumulated in fp32: under Transformers' Trainer, with Accelerate, and in a plain loop."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from support import transformers_models as models
from support import transformers_training as training
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.training_args import ParallelMode

import fusedmlp
from fusedmlp.integrations.fp32_accumulation import FP32Accumulation
from fusedmlp.integrations.transformers import fp32_accumulation, register

MICRO_BATCHES = 8


@pytest.fixture(autouse=True)
def into_grad():
    register(accumulate_wgrad="grad")
    yield
    register()


def build(implementation="fusedmlp"):
    return models.build("mixtral", implementation).bfloat16()


def gradients(model, seeds):
    for seed in seeds:
        ids, dy = models.batch(seed=seed)
        model(ids).logits.backward(dy.bfloat16())
    return {name: param.grad for name, param in model.named_parameters()}


def test_sums_are_those_of_fp32():
    model = build()
    accumulation = FP32Accumulation(model, torch.optim.SGD(model.parameters()))
    expected = {name: 0 for name, _ in model.named_parameters()}
    for seed in range(MICRO_BATCHES):
        for name, grad in gradients(model, [seed]).items():
            expected[name] = expected[name] + grad.double()
        model.zero_grad()
    got = gradients(model, range(MICRO_BATCHES))
    accumulation.remove()
    model.zero_grad()
    rounded = gradients(model, range(MICRO_BATCHES))
    for name, sum_ in expected.items():
        scale = sum_.abs().max()
        assert got[name].dtype == torch.float32
        assert (got[name] - sum_).abs().max() <= 1e-6 * scale, name
        assert rounded[name].dtype == torch.bfloat16
        assert (rounded[name] - sum_).abs().max() > 1e-3 * scale, name


def test_gemms_add_to_it_themselves():
    model = build()
    FP32Accumulation(model, torch.optim.SGD(model.parameters()))
    before = gradients(model, [0])
    addresses = {name: grad.data_ptr() for name, grad in before.items() if "experts" in name}
    assert len(addresses) == 4  # two layers, fc1 and fc2
    after = gradients(model, [1])
    assert {name: after[name].data_ptr() for name in addresses} == addresses


def written_out(model, optimizer, micro_batches, max_norm):
    """Take a step with gradients of single micro-batches, added in fp32, clipped and rounded; return their norm."""
    sums = {}
    for seed in micro_batches:
        for name, grad in gradients(model, [seed]).items():
            sums[name] = sums.get(name, 0) + grad.float()
        model.zero_grad()
    norm = torch.stack([s.norm() for s in sums.values()]).norm()
    for name, param in model.named_parameters():
        param.grad = (sums[name] * min(1, max_norm / (norm + 1e-6))).bfloat16()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def test_accelerate():
    """Accelerate's `accumulate`, `backward` and `clip_grad_norm_`, as in its examples."""
    steps, max_norm = 3, 0.5
    plain, model = build(), build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = [
        written_out(plain, optimizer, range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES), max_norm)
        for step in range(steps)
    ]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    FP32Accumulation(model, optimizer)
    norms = []
    for seed in range(steps * MICRO_BATCHES):
        with accelerator.accumulate(model):
            ids, dy = models.batch(seed=seed)
            # Accelerate divides the loss by the number of micro-batches.
            accelerator.backward((model(ids).logits * dy.bfloat16()).float().sum() * MICRO_BATCHES)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            optimizer.zero_grad()
    assert all(norm > max_norm for norm in norms)
    torch.testing.assert_close(torch.stack(norms), torch.stack(expected), rtol=1e-2, atol=0)
    start = dict(build().named_parameters())
    for (name, got), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        moved = (param - start[name]).abs().max()
        assert (got - param).abs().mean() <= 0.02 * moved, name


class WrittenOut(transformers.Trainer):
    """Sums in fp32 without fusedmlp: takes each micro-batch's gradient out of `.grad`, and adds it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sums = {}
        self.add_callback(RoundsBeforeTheStep())

    def training_step(self, model, *args):
        loss = super().training_step(model, *args)
        for param in model.parameters():
            self.sums[param] = self.sums.get(param, 0) + param.grad.float()
            param.grad = None
            if self.accelerator.sync_gradients:
                param.grad_dtype = torch.float32
                param.grad = self.sums.pop(param)
        return loss


class RoundsBeforeTheStep(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **kwargs):
        for param in model.parameters():
            grad, param.grad, param.grad_dtype = param.grad, None, torch.bfloat16
            param.grad = grad.bfloat16()


OPTIONS = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "learning_rate": 3e-3}


def train(kind, implementation, folder, *, ours, **options):
    callbacks = [fp32_accumulation()] if ours else []
    return training.train(
        models.build(kind, implementation).bfloat16(), folder, callbacks=callbacks, **OPTIONS, **options
    )


def of(log, what):
    return torch.tensor([entry[what] for entry in log])


@pytest.mark.slow
def test_trainer_loses_as_with_gradients_added_in_fp32(tmp_path):
    ours = of(train("mixtral", "fusedmlp", tmp_path, ours=True), "loss")
    written_out = of(train("mixtral", "fusedmlp", tmp_path, ours=False, trainer=WrittenOut), "loss")
    in_bf16 = of(train("mixtral", "fusedmlp", tmp_path, ours=False), "loss")
    assert ours[-5:].mean() < ours[:5].mean() - 0.5
    assert (ours - written_out).abs().mean() <= 0.1 * (in_bf16 - written_out).abs().mean()
    eager = of(train("mixtral", "eager", tmp_path, ours=False, trainer=WrittenOut), "loss")
    torch.testing.assert_close(ours, eager, rtol=torch.finfo(torch.bfloat16).eps / 2, atol=0)  # they round differently


@pytest.mark.slow
def test_trainer_resumes_from_a_checkpoint(tmp_path):
    whole = train("gpt_oss", "fusedmlp", tmp_path, ours=True, save_strategy="steps", save_steps=10)
    rest = train("gpt_oss", "fusedmlp", tmp_path, ours=True, resume=str(tmp_path / "checkpoint-10"))
    assert of(rest[-10:], "step").tolist() == list(range(11, 21))
    assert of(rest[-10:], "loss").tolist() == of(whole[-10:], "loss").tolist()


def test_a_training_leaves_gradients_as_they_were(tmp_path):
    model = build()
    training.train(model, tmp_path, callbacks=[fp32_accumulation()], **OPTIONS | {"max_steps": 1})
    assert {grad.dtype for grad in gradients(model, [0]).values()} == {torch.bfloat16}


def test_only_what_is_trained_in_16_bits_changes():
    model = build()
    model.lm_head.float()
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    FP32Accumulation(model, torch.optim.SGD(model.parameters()))
    assert frozen.grad_dtype == torch.bfloat16
    assert model.lm_head.weight.grad_dtype == torch.float32
    assert model.model.norm.weight.grad_dtype is None  # takes any


def test_a_step_leaves_gradients_to_add_to():
    model = build()
    FP32Accumulation(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.0))
    before = {name: grad.clone() for name, grad in gradients(model, [0, 1]).items()}
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, before[name]), name
        assert param.grad.dtype == torch.float32


def test_refused(tmp_path, monkeypatch):
    model = build()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got str 'm'"):
        FP32Accumulation("m", None)
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer; got object"):
        FP32Accumulation(model, object())
    zero = SimpleNamespace(optimizer=sgd, param_groups=sgd.param_groups, defaults=sgd.defaults, state_dict=dict)
    zero.load_state_dict = lambda state: None
    Accelerator(cpu=True)  # the wrapper looks at its state
    with pytest.raises(
        TypeError, match=r"got DeepSpeedOptimizerWrapper \(DeepSpeed's optimizers accumulate in a dtype"
    ):
        FP32Accumulation(model, DeepSpeedOptimizerWrapper(zero))
    accumulation = FP32Accumulation(model, sgd)
    accumulation.remove()
    buffer = fusedmlp.MainGradBuffer(models.expert_parameters(model))
    with pytest.raises(ValueError, match="gate_up_proj: expected no main_grad; got one"):
        FP32Accumulation(model, sgd)
    buffer.detach()
    monkeypatch.setattr(transformers.TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(ValueError, match="expected one process, or FSDP; got several"):
        training.train(model, tmp_path, callbacks=[fp32_accumulation()])


def test_ddp_and_dtensors_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        linear = torch.nn.Linear(4, 4).bfloat16()
        sgd = torch.optim.SGD(linear.parameters())
        with pytest.raises(ValueError, match="expected one that is not in DistributedDataParallel"):
            FP32Accumulation(DistributedDataParallel(linear), sgd)
        for dtype in (torch.bfloat16, torch.float32):  # FSDP2 gathers and computes in bf16 in both cases
            linear = torch.nn.Linear(4, 4, dtype=dtype)
            fully_shard(linear, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            message = (
                r"weight: expected a plain tensor; got a DTensor .*use fusedmlp\.integrations\.fsdp2\.accumulate_in"
            )
            with pytest.raises(TypeError, match=message):
                FP32Accumulation(linear, torch.optim.SGD(linear.parameters()))
    finally:
        dist.destroy_process_group()
