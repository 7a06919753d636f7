"""Megatron-core's own DDP, checkpoints and MoE layers around `FusedGroupedMLP`, in worlds of gloo processes."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import forked
from support.grids import only_pairs
from support.world import launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_pretrain_step.py"
WORLDS = pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
# State dict of TEGroupedMLP with two experts and biases.
STATE_DICT = {
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
GROUPED_STATE_DICT = {  # with moe_single_grouped_weight and moe_single_grouped_bias
    "linear_fc1.weight": [2, 24, 8],
    "linear_fc1.bias": [2, 24],
    "linear_fc1._extra_state": [0],
    "linear_fc2.weight": [2, 8, 12],
    "linear_fc2.bias": [2, 8],
    "linear_fc2._extra_state": [0],
}
PREFIX, SAVED = "mlp.experts.linear_fc", "mlp.experts.experts.linear_fc"
SHARDED_STATE_DICT = {
    f"{PREFIX}1.weight0": [f"{SAVED}1.weight", [4, 12, 8], [2, 0, 0], [0, 0, 0]],
    f"{PREFIX}1.weight1": [f"{SAVED}1.weight", [4, 12, 8], [3, 0, 0], [0, 0, 0]],
    f"{PREFIX}2.weight0": [f"{SAVED}2.weight", [4, 8, 12], [2, 0, 0], [0, 0, 0]],
    f"{PREFIX}2.weight1": [f"{SAVED}2.weight", [4, 8, 12], [3, 0, 0], [0, 0, 0]],
    f"{PREFIX}1._extra_state": [f"{SAVED}1._extra_state", [4], [2], [0, 0, 0]],
    f"{PREFIX}1._extra_state1": [f"{SAVED}1._extra_state", [4], [3], [0, 0, 0]],
    f"{PREFIX}2._extra_state": [f"{SAVED}2._extra_state", [4], [2], [0, 0, 0]],
    f"{PREFIX}2._extra_state1": [f"{SAVED}2._extra_state", [4], [3], [0, 0, 0]],
}
# Since a version of megatron-core: the number of cells under Megatron-FSDP, and how many of them are refused.
FSDP_CELLS = {
    "0.19": {"quick": (8, 0), 1: (38, 2), 2: (64, 4)},
    "0.17": {"quick": (8, 1), 1: (38, 5), 2: (64, 10)},
}


@WORLDS
def test_gradients_in_every_cell(world_size, tmp_path):
    """Compared with float64 autograd; `support/megatron_experts.py` defines the cells."""
    for count, failures in launch("support.megatron_experts:run_all", world_size, tmp_path, only_pairs()):
        assert count == (18 if only_pairs() else {1: 128, 2: 198}[world_size])
        assert failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("fp8_recipe", ["blockwise", pytest.param("mxfp8", marks=pytest.mark.exhaustive)])
@WORLDS
def test_main_grad_of_eight_bits_in_every_cell(world_size, fp8_recipe, tmp_path):
    """Compared with float64 products of quantized operands; `megatron_eight_bit.py` defines the cells."""
    run = "integrations.megatron_eight_bit:gradients"
    for count, failures in launch(run, world_size, tmp_path, fp8_recipe, only_pairs()):
        assert failures == {}
        assert count == ({1: 18, 2: 19} if only_pairs() else {1: 36, 2: 52})[world_size]


@pytest.mark.slow
def test_weights_are_quantized_when_megatron_begins_a_step(tmp_path):
    (found,) = launch("integrations.megatron_eight_bit:kept_copies", 1, tmp_path)
    counts = {how: count for how, (count, _) in found.items()}
    once, always = dict.fromkeys(("as Megatron's schedules", "one parameter"), 2), {"a write within a step": 6}
    assert counts == {**once, **always, "without a word": 0, "no cache": 0}
    grads = [grads for _, grads in found.values()]
    assert grads[0][0] != grads[0][1]
    assert all(other == grads[0] for other in grads[1:])


@pytest.mark.slow
@WORLDS
def test_eight_bits_under_fsdp(world_size, tmp_path):
    for found in launch("integrations.megatron_eight_bit_fsdp:under_fsdp", world_size, tmp_path):
        assert len(found) == (4 if metadata.version("megatron-core") >= "0.17" else {1: 1, 2: 3}[world_size])
        assert all(distance < 5e-4 for distance in found.values()), found  # megatron_eight_bit.ALLOWED


def test_rows_arrive_in_8_bits(tmp_path):
    (found,) = launch("integrations.megatron_eight_bit:rows_in_8_bits", 1, tmp_path)
    assert found == [True] * 10


@pytest.mark.slow
@WORLDS
def test_layers_of_eight_bits(world_size, tmp_path):
    """Whole layers, with and without Megatron's padding of what is routed to an expert."""
    assert launch("integrations.megatron_eight_bit:layers", world_size, tmp_path) == [4] * world_size


def test_megatron_before_0_17_is_refused():
    """Its Megatron-FSDP adds a rank's own gradient to the reduced one."""
    code = """from megatron.core import package_info
package_info.VERSION = 0, 16, 1, ""
import fusedmlp.integrations.megatron"""
    ran = forked.run("-c", code)
    assert re.search(r"ImportError: .*expected megatron-core>=0\.17; got ", ran.stderr), ran.stderr


@pytest.mark.slow
@WORLDS
def test_gradients_under_fsdp_in_every_cell(world_size, tmp_path):
    """The same, with two steps of an optimizer; `megatron_fsdp.py` defines the cells, and which are refused."""
    numbers = next(row for since, row in FSDP_CELLS.items() if metadata.version("megatron-core") >= since)
    for counts, failures, delayed in launch("integrations.megatron_fsdp:run_all", world_size, tmp_path, only_pairs()):
        assert failures == {}
        assert (counts["cells"], counts["refused"]) == numbers["quick" if only_pairs() else world_size]
        assert "config.delay_wgrad_compute: expected False under Megatron-FSDP" in delayed


def test_megatron_would_lose_or_double_what_our_module_does_not_do(tmp_path):
    (result,) = launch("support.megatron_experts:sabotage", 1, tmp_path)
    assert result["a dummy that is not zero"]["ours"] < 1e-6
    assert result["a dummy that is not zero"]["sabotaged"] > 1e-3
    assert max(result["a returned gradient after a fused one"].values()) < 1e-6  # caught, before Megatron drops it
    assert "param.grad being None is not safe when overlap_grad_reduce is True" in result["no dummy"]


@pytest.mark.slow
def test_config_and_state(tmp_path):
    (found,) = launch("integrations.megatron_layers:config_and_state", 1, tmp_path)
    assert found["honoured"] == 13
    assert re.search("FusedGroupedMLP clamps at 0.1; TEGroupedMLP, up to .* does not", found["clamp_is_said"])
    kept = 10 * (8 + 24 + 1) + 4 * (24 + 12) * 8 + 5  # x, h and probs of 10 rows; weights of 4 experts; 5 offsets
    assert found["kept"] == {"default": kept, "moe_act recomputed": kept}
    x, h = [10, 8], [10, 24]  # Megatron keeps those of the last layer in the second step
    sent = {"expert_fc1": ([x] * 3, 3), "moe_act": ([h] * 3, 0)}
    sent |= dict.fromkeys(("expert_fc1+moe_act", "fused_group_mlp"), ([x, h] * 3, 3))
    offloaded = None if metadata.version("megatron-core") < "0.19" else {k: [*v] for k, v in sent.items()}
    assert found["offloaded"] == offloaded
    count, errors = found["effects_on_linears"]
    assert count == 12
    assert len(errors) == 13
    for kind, error in errors.items():
        name = kind.partition(": ")[2]
        words = "no rows" if name == "ExpertLinear" else "a part that FusedGroupedMLP can call without rows"
        assert (error or "").startswith(f"TypeError: {name}: expected {words}"), (kind, error)
    assert found["order_of_hooks"] == [["linear_fc2", True], ["linear_fc1", True]]
    assert found["state_dict_names"] == [STATE_DICT] * 2
    fresh = [f"{device} torch.{dtype}" for device in ("CPU", "GPU") for dtype in ("float32", "bfloat16")]
    assert found["fresh_weights"] == {"TEGroupedMLP": fresh, "SequentialMLP": []}
    assert found["grouped_state_dict"] == GROUPED_STATE_DICT
    assert found["recipes"] == {
        "unset": [None, "recipe"],
        "blockwise": ["fp8_block", "recipe"],
        "mxfp8, wgrad in bf16": ["mxfp8", "bf16"],
        "enumerated": ["fp8_block", "recipe"],
    }
    frees = {"alltoall 1", "hybridep 1", "hybridep 2", "ncclep 1", "ncclep 2"}
    for name, (refuses, freed) in found["freed_inputs"].items():
        assert refuses == (name in frees), name
        assert freed == refuses, name
    assert found["fields_unknown"] == []


OTHER_EXPERTS = {
    "a class": r"<class 'integrations\.megatron_config_changes\.OwnExperts'>",
    "a class in a partial": r"<class '.*\.OwnGroupedExperts'>",
    "a class in a ModuleSpec": r"<class '.*\.OwnExperts'>",
    "a name": r"NamedExperts",
    "a function": r"<function other_experts at .*>",
}


@pytest.mark.slow
def test_config_that_changes_after_construction(tmp_path):
    (found,) = launch("integrations.megatron_config_changes:config_changes", 1, tmp_path)
    for name, (as_if_early, as_before, goes_back) in found["followed"].items():
        assert (as_if_early, as_before, goes_back) == (True, name == "fp8_param", True), name
    assert found["refused"] >= (7 if metadata.version("megatron-core") < "0.18" else 8)  # fields that exist
    # Read once, for shapes, first values and attributes of parameters.
    assert set(found["fields_read_in_silence"]) <= {
        *("hidden_size", "moe_ffn_hidden_size", "ffn_hidden_size", "moe_latent_size", "params_dtype"),
        *("init_method", "output_layer_init_method", "perform_initialization", "use_cpu_initialization"),
        *("tensor_model_parallel_size", "moe_use_grouped_tensor", "init_model_with_meta_device"),
    }
    assert found["quick_gelus"] == [True, True]
    assert found["first_and_last_layers"] == [[False, True], [True, False], [False, True], [False, True]]
    for name, message in found["replaced"].items():
        if name in OTHER_EXPERTS:
            assert re.search(f"TypeError: layer_spec: .* got {OTHER_EXPERTS[name]}$", message or ""), name
        else:
            assert message is None, name


# The second fails while it loads, in Megatron's own code: PyTorch's Adam keeps a "step", and Apex is not installed.
OPTIMIZER_FORMATS = {
    "dp_reshardable False": "None",
    "dp_reshardable True": "None",
    "fully_reshardable False": "KeyError: 'step'",
    "fully_reshardable True": "ValueError: .* not in model_sharded_state_dict",
    "fully_sharded_model_space False": "CheckpointingException: ShardedTensor.flattened_range is not supported",
    "fully_sharded_model_space True": "ValueError: .* not in model_sharded_state_dict",
}


@pytest.mark.slow
@WORLDS
def test_checkpoints_of_the_distributed_optimizer(world_size, tmp_path):
    """By format, and by `moe_single_grouped_weight`: what docs/megatron.md says."""
    if metadata.version("megatron-core") < "0.19":
        pytest.skip("the page tells of 0.19's formats")
    for found in launch("integrations.megatron_optimizer_checkpoints:optimizer_formats", world_size, tmp_path):
        assert found.keys() == OPTIMIZER_FORMATS.keys()
        for name, message in found.items():
            assert re.match(OPTIMIZER_FORMATS[name], str(message), re.DOTALL), (name, message)


@pytest.mark.slow
@WORLDS
def test_fp8_param_trains_as_without(world_size, tmp_path):
    """Megatron's DDP and distributed optimizer, three steps: gradients and weights, bit for bit."""
    for found in launch("integrations.megatron_config_changes:fp8_param", world_size, tmp_path):
        ways = ("blockwise False", "blockwise True", "mxfp8 False", "mxfp8 True")  # does overlap_param_gather gather
        assert found == {way: [True, True] for way in ways}  # equal, and weights changed


@pytest.mark.slow
@WORLDS
def test_layers_and_checkpoints(world_size, tmp_path):
    """Whole layers beside those with Megatron's sequential experts; see `megatron_layers.py`."""
    for rank, found in enumerate(launch("integrations.megatron_layers:layers_and_checkpoints", world_size, tmp_path)):
        assert found["layers"] == {1: 16, 2: 28}[world_size]
        assert found["checkpoints"] == {1: 10, 2: 40}[world_size]
        if world_size == 2:
            on_gpu = ["GPU torch.float32", "GPU torch.bfloat16"]
            assert found["fresh_weights"] == {"TEGroupedMLP": on_gpu, "SequentialMLP": []}
            assert found["shards_of_fresh_weights"] == [True] * 8
        if rank == 1:
            assert found["sharded_names"] == SHARDED_STATE_DICT


@pytest.mark.slow
def test_where_ddp_lays_main_grad():
    """As `docs/megatron.md` and `doctor --weights megatron` say; see `megatron_buffers.py`."""
    done = forked.run("-m", "integrations.megatron_buffers", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {tuple(row["modulo_16"]) for row in found["rows"]} == {(0,)}
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    assert [line for line in found["table"][1:] if line not in page] == []
    together, apart = [True, True], [False, True]  # descriptors, aligned
    assert found["in_memory"] == {
        "DDP": [together] * 6,
        "DDP, odd": [[True, False]] * 4 + [together] * 2,
        "distributed, odd": [together] * 6,
        "distributed, buckets": [together, apart] * 3,
        "distributed, buckets, EP": [apart, apart, together] + [apart] * 3,
        "distributed, a bucket for each weight, EP": [together] * 6,
        "distributed, no buckets": [together] * 6,
    }


@pytest.mark.exhaustive
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
