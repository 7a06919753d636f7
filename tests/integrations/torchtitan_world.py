"""torchtitan's layer with its own expert and tensor parallelism, in a world of gloo processes."""

from functools import partial

import spmd_types as spmd
import torch
import torch.distributed as dist
from support import torchtitan_moe as layers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.distributed import parallel_dims, utils
from torchtitan.models.common.moe_sharding import set_moe_sharding_config

from fusedmlp.integrations.torchtitan import FusedExpertsConverter

_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def parallel():
    """Relative errors of results and all gradients against one process in float64, by kind of parallelism."""
    parallel_dims.device_type = "cpu"  # without a GPU, torchtitan takes one for granted
    utils.set_spmd_backend("partial_dtensor")
    for experts_apart in (True, False):
        for sharded in (False, True):
            _check_random_weights(experts_apart, sharded)
    return {"expert": _errors(True), "tensor": _errors(False)}


def _config(experts_apart, convert=True):
    made = layers.config()
    if convert:
        made = FusedExpertsConverter.Config().build().convert(made)
    # torchtitan, too, does this after the conversion and by the names of the plain experts.
    set_moe_sharding_config(made, enable_ep=experts_apart, enable_sp=False, expert_param_layout=_LAYOUT)
    return made


def _check_random_weights(experts_apart, sharded):
    """Compare, bit for bit, fresh weights and their shards with those of torchtitan's own experts; also under FSDP2.

    In the order of torchtitan's trainer: build on meta, parallelize, then initialise, each weight in its own way.
    """
    states = []
    for convert in (False, True):
        made = _config(experts_apart, convert)
        init = {name: partial(torch.nn.init.normal_, std=0.1 * (1 + i)) for i, name in enumerate(layers.NAMES)}
        made.routed_experts.inner_experts.param_init = init
        with torch.device("meta"):
            moe = made.build()
        if sharded:
            fully_shard(moe, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            moe.parallelize(_dims(dist.get_world_size(), experts_apart))
        moe.to_empty(device="cpu")
        torch.manual_seed(3)
        moe.init_states(buffer_device=torch.device("cpu"))
        state = moe.state_dict().items()
        states.append({name: (_full(t), t.to_local() if isinstance(t, DTensor) else t) for name, t in state})
    own, fused = states
    assert fused.keys() == own.keys()
    for name, tensors in own.items():
        assert all(map(torch.equal, fused[name], tensors)), (experts_apart, sharded, name)


def _errors(experts_apart):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    moe = layers.build(_config(experts_apart))
    whole = layers.with_loop(moe, torch.float64)
    seeds = range(world_size) if experts_apart else [0]  # ranks of tensor parallelism see the same tokens
    expected = [layers.results(whole, *layers.batch(seed)) for seed in seeds]
    moe.parallelize(_dims(world_size, experts_apart))
    own = rank if experts_apart else 0
    x, dy = layers.batch(own)
    x.requires_grad_()
    y = _full(moe(x))
    y.backward(dy)
    found, wanted = {"y": y, "dx": x.grad}, {name: expected[own][name] for name in ("y", "dx")}
    for name, parameter in moe.named_parameters():
        for key, grad in layers.halves(name, _full(parameter.grad)).items():
            found[key] = grad
            # Experts see the tokens of all ranks; torchtitan leaves it to FSDP to reduce the rest.
            wanted[key] = sum(e[key] for e in expected) if "inner_experts" in key else expected[own][key]
    shards = {tuple(w.to_local().shape) for w in layers.fused_of(moe).parameters()}
    assert len(shards & {(2, 48, 16), (2, 16, 24), (4, 24, 16), (4, 16, 12)}) == 2, shards
    scales = {key: reference.abs().max() for key, reference in wanted.items()}
    return {key: float((found[key].double() - wanted[key]).abs().max() / scale) for key, scale in scales.items()}


def _dims(world_size, experts_apart):
    dims = parallel_dims.ParallelDims(
        dp_replicate=1,
        dp_shard=world_size if experts_apart else 1,
        cp=1,
        tp=1 if experts_apart else world_size,
        pp=1,
        ep=world_size if experts_apart else 1,
        world_size=world_size,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
