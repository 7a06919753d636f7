"""Megatron-core's own DDP, checkpoints and MoE layers around `FusedGroupedMLP`, in worlds of gloo processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.world import launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_pretrain_step.py"
WORLDS = pytest.mark.parametrize("world_size", [1, 2])


@WORLDS
def test_gradients_in_every_cell(world_size, tmp_path):
    """Against float64 autograd; what a cell is stands in `support/megatron_experts.py`."""
    for count, failures in launch("support.megatron_experts:run_all", world_size, tmp_path):
        assert count == {1: 122, 2: 186}[world_size]
        assert failures == {}


@WORLDS
def test_gradients_under_fsdp_in_every_cell(world_size, tmp_path):
    """The same, with two steps of an optimizer; what a cell is stands in `support/megatron_fsdp.py`."""
    for count, failures in launch("support.megatron_fsdp:run_all", world_size, tmp_path):
        assert count == {1: 48, 2: 80}[world_size]
        assert failures == {}


def test_fsdp_where_gradients_could_not_be_right_is_refused(tmp_path):
    for found in launch("support.megatron_fsdp:refusals", 2, tmp_path):
        assert "expected no_shard or optim, one micro-batch, or calculate_per_token_loss" in found["scaled again"]
        assert "config.delay_wgrad_compute: expected False under Megatron-FSDP" in found["delayed"]


@pytest.mark.parametrize("what", ["a returned gradient after a fused one", "a dummy that is not zero"])
def test_megatron_would_lose_or_double_what_our_module_does_not_do(what, tmp_path):
    (result,) = launch("support.megatron_experts:sabotage", 1, tmp_path)
    assert result[what]["ours"] < 1e-6
    assert result[what]["sabotaged"] > 1e-3


def test_without_a_dummy_megatron_refuses(tmp_path):
    (result,) = launch("support.megatron_experts:sabotage", 1, tmp_path)
    assert "param.grad being None is not safe when overlap_grad_reduce is True" in result["no dummy"]


@WORLDS
def test_whole_layers_equal_those_with_sequential_experts(world_size, tmp_path):
    assert launch("support.megatron_layers:layers", world_size, tmp_path) == [{1: 14, 2: 44}[world_size]] * world_size


@WORLDS
def test_checkpoints_load_into_the_other_kind_of_experts(world_size, tmp_path):
    assert (
        launch("support.megatron_layers:checkpoints", world_size, tmp_path) == [{1: 6, 2: 24}[world_size]] * world_size
    )


def test_the_example_trains_a_gpt_as_plain_autograd_does():
    def losses(*options):
        command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--steps", "8", "--device", "cpu", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", done.stdout)]

    fused = losses()
    assert len(fused) == 8
    assert fused[-1] < fused[0] - 0.3
    assert losses("--plain") == pytest.approx(fused, abs=2e-3)


def test_the_state_dict_is_that_of_te_grouped_mlp(tmp_path):
    (names,) = launch("support.megatron_layers:state_dict_names", 1, tmp_path)
    assert names == {
        "linear_fc1.weight0": [24, 8],  # the gate's rows first
        "linear_fc1.weight1": [24, 8],
        "linear_fc1.bias0": [24],
        "linear_fc1.bias1": [24],
        "linear_fc1._extra_state": [0],
        "linear_fc2.weight0": [8, 12],
        "linear_fc2.weight1": [8, 12],
        "linear_fc2.bias0": [8],
        "linear_fc2.bias1": [8],
        "linear_fc2._extra_state": [0],
    }


def test_the_sharded_state_dict_is_that_of_te_grouped_mlp(tmp_path):
    _, names = launch("support.megatron_layers:sharded_names", 2, tmp_path)
    prefix, saved = "mlp.experts.linear_fc", "mlp.experts.experts.linear_fc"
    assert names == {
        f"{prefix}1.weight0": [f"{saved}1.weight", [4, 12, 8], [2, 0, 0], [0, 0, 0]],
        f"{prefix}1.weight1": [f"{saved}1.weight", [4, 12, 8], [3, 0, 0], [0, 0, 0]],
        f"{prefix}2.weight0": [f"{saved}2.weight", [4, 8, 12], [2, 0, 0], [0, 0, 0]],
        f"{prefix}2.weight1": [f"{saved}2.weight", [4, 8, 12], [3, 0, 0], [0, 0, 0]],
        f"{prefix}1._extra_state": [f"{saved}1._extra_state", [4], [2], [0, 0, 0]],
        f"{prefix}1._extra_state1": [f"{saved}1._extra_state", [4], [3], [0, 0, 0]],
        f"{prefix}2._extra_state": [f"{saved}2._extra_state", [4], [2], [0, 0, 0]],
        f"{prefix}2._extra_state1": [f"{saved}2._extra_state", [4], [3], [0, 0, 0]],
    }


MESSAGES = {
    "fp8": r"config\.fp8: expected it unset, as .* got 'e4m3'",
    "fp4": r"config\.fp4: expected it unset",
    "use_te_activation_func": r"config\.use_te_activation_func: expected it unset",
    "use_transformer_engine_op_fuser": r"config\.use_transformer_engine_op_fuser: expected it unset",
    "moe_mlp_glu_interleave_size": r"config\.moe_mlp_glu_interleave_size: expected it unset, .* got 32",
    "moe_single_grouped_weight": r"config\.moe_single_grouped_weight: expected it unset",
    "moe_single_grouped_bias": r"config\.moe_single_grouped_bias: expected it unset",
    "activation_func_fp8_input_store": r"config\.activation_func_fp8_input_store: expected it unset",
    "overlap_dispatch_backward_with_experts_wgrad": r"config\.overlap_dispatch_backward_with_experts_wgrad: ",
    "activation_func": r"config\.activation_func: expected a gated activation that fusedmlp has; got .*tanh",
    "gated squared relu": r"config\.activation_func: expected a gated activation that fusedmlp has; got .*squared_relu",
    "bias_dropout_fusion": r"config\.bias_dropout_fusion: expected False with add_bias_linear",
    "expert_tensor_parallel_size": r"config\.add_bias_linear: expected expert_tensor_parallel_size 1, .* got 2",
    "moe_apply_probs_on_input": r"config\.moe_apply_probs_on_input: expected moe_router_topk 1; got 2",
    "offload_modules": r"config\.offload_modules: expected none inside the experts, .* got \['moe_act'\]",
    "DDP does not delay": r"expected DistributedDataParallelConfig\(delay_wgrad_compute=True\) too",
    "fusion without main_grad": r"fc1_weight\[0\]: .* expects a main_grad attribute",
    "fp8 state": r"_extra_state: expected no fp8 state; got 3 bytes",
    "no experts": r"layer_spec: expected a Megatron spec that holds a MoELayer",
}


def test_what_cannot_be_honoured_is_refused(tmp_path):
    (found,) = launch("support.megatron_layers:refusals", 1, tmp_path)
    assert found.pop("DDP does not delay, no gradient") is None
    assert found.keys() == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert re.search(message, found[name] or ""), (name, found[name])
