"""Compile every kernel for a GPU that need not be present: `python -m support.compile_kernels sm_90`.

Prints a JSON list of `{"kernel", "dtype", "spill_bytes", "registers", "shared_bytes"}`. Runs in its own process: a
process in which kernels are interpreted cannot compile them.
"""

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedmlp.kernels import configs, grouped_dgrad_act, grouped_fc1_act, grouped_gemm, grouped_wgrad, schedule

ACT = {"GATED": True, "CHANNEL_STEP": 1, "CURVE": "sigmoid", "ALPHA": 1.0, "LIMIT": None, "OFFSET": 0.0}
POINTERS = {
    "offsets_ptr": "*i32",
    "tiles_ptr": "*i32",
    "counts_ptr": "*i64",
    "valid_ptr": "*i1",
    "partial_ptr": "*fp32",
    "probs_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "dw_ptr": "*fp32",
    "w_table_ptr": "*i64",
    "dw_table_ptr": "*i64",
    "db_table_ptr": "*i64",
    "bias_table_ptr": "*i64",
    "segments_ptr": "*i64",
}
NO_TABLES = dict.fromkeys(("w_table_ptr", "dw_table_ptr", "db_table_ptr", "bias_table_ptr", "segments_ptr"))
NO_BIAS = dict.fromkeys(
    ("bias_ptr", "bias_table_ptr", "db_ptr", "db_table_ptr", "scale_ptr", "probs_ptr", "partial_ptr")
)
NO_DW = dict.fromkeys(("dw_ptr", "dw_table_ptr", "x_ptr", "segments_ptr"))


KERNELS = {
    "gemm": grouped_gemm._grouped_gemm_kernel,
    "fc1_act": grouped_fc1_act._grouped_fc1_act_kernel,
    "dgrad_act": grouped_dgrad_act._grouped_dgrad_act_kernel,
    "wgrad": grouped_wgrad._grouped_wgrad_kernel,
}
VARIANTS = {
    "gemm": ({}, NO_TABLES, NO_TABLES | NO_BIAS),
    "fc1_act": (
        ACT,
        ACT | {"GATED": False, "CURVE": "gelu"},
        ACT | {"CHANNEL_STEP": 2, "LIMIT": 7.0},
        ACT | NO_TABLES | NO_BIAS,
    ),
    "dgrad_act": (
        ACT | {"LIMIT": 7.0, "OFFSET": 1.0},
        ACT | {"CURVE": "gelu_tanh"},
        ACT | {"CHANNEL_STEP": 2, "LIMIT": 7.0},
        ACT | NO_TABLES | NO_BIAS,
    ),
    "wgrad": (
        {"ACCUMULATE": True},
        {"ACCUMULATE": False},
        {"ACCUMULATE": True} | NO_TABLES | NO_BIAS,
        {"ACCUMULATE": False} | NO_DW,
    ),
}


def blocks(key, tile, step):
    """Block shapes of descriptors; none on the pointer path, nor for what is absent."""
    if key.path != "tma":
        return {}
    rows, width = [1, 1, tile.BLOCK_M], tile.BLOCK_N // tile.SUBTILES
    operand, columns = [*rows, tile.BLOCK_K], tile.BLOCK_N * step
    k_contiguous = key.kernel != "dgrad_act"
    return {
        "x_desc": operand,
        "dy_desc": operand,
        "w_desc": [1, columns, tile.BLOCK_K] if k_contiguous else [1, tile.BLOCK_K, tile.BLOCK_N],
        "y_desc": [*rows, width],
        "h_desc": [*rows, width * step],
        "h_linear_desc": [*rows, width],
        "dh_desc": [*rows, width * step],
        "dh_linear_desc": [*rows, width],
        "a_desc": [*rows, width],
    }


def tile_constants(key, tile, dtype, backend):
    letters = {"gemm": "MNK", "fc1_act": "MFH", "dgrad_act": "MFH", "wgrad": "RNK"}[key.kernel]
    sizes = (tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K)
    return {f"BLOCK_{letter}": size for letter, size in zip(letters, sizes, strict=True)} | {
        "SUBTILES": tile.SUBTILES,
        "GROUP_M": tile.GROUP_M,
        "FLATTEN": tile.PER_SM > 0,
        "K_CONTIGUOUS": key.kernel != "dgrad_act",
        "REVERSED": False,
        "ALIGNED": True,
        "PRECISION": "tf32" if dtype == "fp32" and backend == "cuda" else "ieee",
    }


def variants(name, backend):
    schedule_constants = {"NUM_EXPERTS": 512, "BLOCK_M": 64, "BLOCK_E": 512, "BLOCK_G": 1024, "BLOCK_T": 128}
    yield "expert_offsets", schedule._expert_offsets_kernel, schedule_constants, {}, {}, "bf16"
    yield "tile_schedule", schedule._tile_schedule_kernel, schedule_constants, {}, {}, "bf16"
    for key, tile in configs.shipped(name):
        if key.shape == "long":
            dtype = "bf16" if key.bits == 16 else "fp32"
            for extra in VARIANTS[key.kernel]:
                constants = tile_constants(key, tile, dtype, backend) | extra
                options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
                descriptors = blocks(key, tile, extra.get("CHANNEL_STEP", 1))
                yield key.kernel, KERNELS[key.kernel], constants, descriptors, options, dtype


def compile_variant(kernel, constants, descriptors, options, dtype, target):
    signature, values = {}, {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name in descriptors:
            signature[name] = f"tensordesc<{dtype}{descriptors[name]}>"
        elif name.endswith("_desc") or name == "rows_ptr":
            signature[name], values[name] = "constexpr", None
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        elif name.endswith(("_r", "_e", "_n", "_k", "_h", "_g", "_f")) and name.startswith("stride"):
            last = {"stride_w_k", "stride_dw_k", "stride_w_f"} | (
                {"stride_w_h"} if "stride_w_g" in kernel.arg_names else set()
            )
            signature[name] = "constexpr" if name in last else "i64"
            if name in last:
                values[name] = 1
        else:
            signature[name] = "i32"
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and not name.endswith("_desc")
    }
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options=options)


def resources(compiled):
    """Registers and spilled bytes, from the assembler's own report."""
    if "ptx" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        return int(re.search(r"vgpr_count:\s+(\d+)", text)[1]), int(re.search(r"vgpr_spill_count:\s+(\d+)", text)[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        out = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    report = out.stdout + out.stderr
    return int(re.search(r"REG:(\d+)", report)[1]), int(re.search(r"STACK:(\d+)", report)[1])


def main(name):
    if name.startswith("gfx"):
        target = GPUTarget("hip", name, 64)
    else:
        target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    rows = []
    for kernel_name, kernel, constants, descriptors, options, dtype in variants(name, target.backend):
        compiled = compile_variant(kernel, constants, descriptors, options, dtype, target)
        registers, spill = resources(compiled)
        shared = compiled.metadata.shared
        row = {"kernel": kernel_name, "dtype": dtype, "registers": registers}
        rows.append(row | {"spill_bytes": spill, "shared_bytes": shared})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
