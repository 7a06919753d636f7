"""Hundreds of steps of the demo's model under DDP: plain, fused, disturbed, killed and resumed. Runs in a `world`."""

import gc
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.oracle.tolerance import assert_close
from fusedmlp.demo.command import TEXT
from fusedmlp.demo.model import LanguageModel, MixtureOfExperts, ModelConfig
from fusedmlp.integrations.ddp import grads_in_buckets

CONFIG = ModelConfig(layers=1, hidden=32, heads=2, experts=8, experts_per_token=2, ffn=32, context=16)
MICRO_BATCHES, SEQUENCES, WARMUP, LEARNING_RATE, SAVE_EVERY = 2, 1, 20, 4e-3, 100


def windows(step, micro):
    """This rank's data, a function of step, micro-batch and rank only: `[SEQUENCES, context + 1]` bytes."""
    generator = torch.Generator().manual_seed((step * MICRO_BATCHES + micro) * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONFIG.context, (SEQUENCES, 1), generator=generator)
    return TEXT[starts + torch.arange(CONFIG.context + 1)]


def flipped(router):
    """Choices of experts, but that the token with the closest choice goes to its runner-up expert.

    A rounding difference changes routing no more than that.
    """
    top = router.topk(CONFIG.experts_per_token + 1, dim=-1)
    closest = (top.values[:, -2] - top.values[:, -1]).argmin()
    top.indices[closest, -2] = top.indices[closest, -1]
    return top.indices[:, :-1]


class Trainer:
    """`fused`: experts add into DDP's buckets; else autograd accumulates. `flip`: routing is `flipped`."""

    def __init__(self, *, fused, steps, flip=False):
        torch.manual_seed(0)
        self.model = LanguageModel(CONFIG, "grad" if fused else "off")
        for module in self.model.modules() if flip else ():
            if isinstance(module, MixtureOfExperts):
                module.choose = flipped
        self.ddp = (
            grads_in_buckets(
                self.model,
                self.model.expert_weights(),
                lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
            )
            if fused
            else DistributedDataParallel(self.model)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / steps)
        )
        self.empty = 0  # experts without tokens on this rank
        for module in self.model.modules():
            if hasattr(module, "backward_dw") and hasattr(module, "fc1"):
                module.register_forward_pre_hook(self._count_empty)

    def _count_empty(self, _, arguments):
        self.empty += int((arguments[1] == 0).sum())

    def backward(self, step, kill=False):
        """The loss, mean over this rank's micro-batches."""
        losses = []
        for micro in range(MICRO_BATCHES):
            with nullcontext() if micro == MICRO_BATCHES - 1 else self.ddp.no_sync():
                loss, balance = self.ddp(windows(step, micro))
                ((loss + 0.01 * balance) / MICRO_BATCHES).backward()
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)  # with half of the step's gradients in the buckets
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def update(self):
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, path, step):
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in self.parts().items()}
            torch.save(state | {"step": step}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # a complete one exists at any time
        dist.barrier()

    def load(self, path):
        state = torch.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        return state["step"]


def mean_over_ranks(losses):
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def memory():
    """Resident bytes of this process, and bytes of all tensors that Python can see."""
    gc.collect()
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if is_tensor(t)}
    return psutil.Process().memory_info().rss, sum(tensors.values())


def is_tensor(thing):
    return type(thing) in (torch.Tensor, torch.nn.Parameter)


def train(trainer, steps, *, start=0, checkpoint=None, kill_at=None):
    """Losses of the steps from `start` to `steps`, and the memory in use after a fifth of them and at the end."""
    losses, used = [], []
    for step in range(start, steps):
        losses.append(trainer.backward(step, kill=step == kill_at))
        trainer.update()
        if checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
            trainer.save(checkpoint, step + 1)
        if step + 1 in (steps // 5, steps):
            used.append(memory())
    return {"losses": mean_over_ranks(losses), "memory": used, "empty": trainer.empty}


def in_lockstep(steps):
    """Train without fusion; in every fourth step compare fused gradients, at the same weights on the same data."""
    plain, fused = Trainer(fused=False, steps=steps), Trainer(fused=True, steps=steps)
    losses = []
    for step in range(steps):
        losses.append(plain.backward(step))
        if step % 4 == 0:
            fused.model.load_state_dict(plain.model.state_dict())
            fused.ddp.zero_grad()
            assert fused.backward(step) == losses[-1]  # forward is the same
            expected = {name: p.grad for name, p in plain.model.named_parameters()}
            got = {name: p.grad for name, p in fused.model.named_parameters()}
            assert_close(got, expected, expected, torch.float32)
        plain.update()
    return mean_over_ranks(losses)


def compare(steps):
    """`control` disturbs the routing as little as possible: its change of the losses bounds that of rounding."""
    fused = train(Trainer(fused=True, steps=steps), steps)
    plain = in_lockstep(steps)
    control = train(Trainer(fused=False, steps=steps, flip=True), steps)["losses"]
    return {"fused": fused, "plain": plain, "control": control}


def killed(steps, folder, kill_at):
    train(Trainer(fused=True, steps=steps), steps, checkpoint=Path(folder) / "checkpoint.pt", kill_at=kill_at)


def resumed(steps, folder, until):
    trainer = Trainer(fused=True, steps=steps)
    start = trainer.load(Path(folder) / "checkpoint.pt")
    return start, train(trainer, until, start=start)["losses"]
