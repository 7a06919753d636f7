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
    "segment_offsets_ptr": "*i64",
    "order_ptr": "*i32",
}
NO_TABLES = dict.fromkeys(("w_table_ptr", "dw_table_ptr", "db_table_ptr", "bias_table_ptr", "segments_ptr"))
NO_BIAS = dict.fromkeys(
    ("bias_ptr", "bias_table_ptr", "db_ptr", "db_table_ptr", "scale_ptr", "probs_ptr", "partial_ptr")
)
NO_DW = dict.fromkeys(("dw_ptr", "dw_table_ptr", "right_ptr", "segments_ptr"))


def tile_constants(name, dtype, backend):
    tile = configs._POINTER[name, "pointer", 16]["long"]
    sizes = {"gemm": "MNK", "fc1_act": "MFH", "dgrad_act": "MFH"}[name]
    blocks = (tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K)
    constants = {f"BLOCK_{letter}": size for letter, size in zip(sizes, blocks, strict=True)}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return constants | {"PRECISION": "tf32" if dtype == "fp32" and backend == "cuda" else "ieee"}, options


def wgrad_variants(target, backend):
    """Every shipped tile with everything that can be asked of it, as `(kernel constants, options, dtype)`."""
    for key, tile in configs.shipped(target):
        if key.kernel != "wgrad":
            continue
        dtype = "bf16" if key.bits == 16 else "fp32"
        constants = {"BLOCK_R": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_K": tile.BLOCK_K, "GROUP_N": tile.GROUP_M}
        constants["SUBTILES"] = tile.SUBTILES
        constants |= {"REVERSED": False, "DW_ALIGNED": True, "SEGMENTS_ALIGNED": True}
        constants |= dict.fromkeys(("left_desc", "right_desc", "dw_desc", "dw_table_ptr", "db_table_ptr"))
        bias, segments = {"segments_ptr": None, "SWAPPED": False}, NO_BIAS | {"SWAPPED": False}
        swapped = bias | {"SWAPPED": True}
        for accumulate in (True, False):
            for extra in (bias, segments, swapped):
                variant = constants | {"ACCUMULATE": accumulate} | extra
                if key.path == "tma":
                    rank = "1, 1, 1" if extra is segments else "1, 1"
                    for name, block in (("left", tile.BLOCK_N), ("right", tile.BLOCK_K)):
                        variant[f"{name}_desc"] = f"tensordesc<{dtype}[{rank}, {tile.BLOCK_M}, {block}]>"
                    dw_dtype = "fp32" if accumulate else dtype
                    variant["dw_desc"] = f"tensordesc<{dw_dtype}[1, {tile.BLOCK_N}, {tile.BLOCK_K // tile.SUBTILES}]>"
                    variant |= dict.fromkeys(("left_ptr", "right_ptr", "dw_ptr"))
                elif extra is segments:
                    del variant["dw_table_ptr"]
                for precision in ("ieee", "tf32") if key.bits == 32 and backend == "cuda" else ("ieee",):
                    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
                    yield variant | {"PRECISION": precision}, options, dtype
        if key.path == "pointer":
            yield (
                constants | {"ACCUMULATE": False, "PRECISION": "ieee"} | bias | NO_DW,
                {"num_warps": tile.num_warps},
                dtype,
            )


def variants(target, backend):
    schedule_constants = {"NUM_EXPERTS": 128, "BLOCK_M": 64, "BLOCK_E": 128, "BLOCK_G": 256, "BLOCK_T": 32}
    order_constants = {"NUM_EXPERTS": 512, "BLOCK_E": 16, "BLOCK_ALL": 512}
    yield "expert_order", schedule._expert_order_kernel, order_constants, {}, "bf16"
    for constants, options, dtype in wgrad_variants(target, backend):
        yield "wgrad", grouped_wgrad._grouped_wgrad_kernel, constants, options, dtype
    yield "expert_offsets", schedule._expert_offsets_kernel, schedule_constants, {}, "bf16"
    yield "tile_schedule", schedule._tile_schedule_kernel, schedule_constants, {}, "bf16"
    for dtype in ("bf16", "fp32"):
        for name, kernel, extra in (
            ("gemm", grouped_gemm._grouped_gemm_kernel, {}),
            ("fc1_act", grouped_fc1_act._grouped_fc1_act_kernel, ACT),
            ("fc1_act", grouped_fc1_act._grouped_fc1_act_kernel, ACT | {"GATED": False, "CURVE": "gelu"}),
            ("dgrad_act", grouped_dgrad_act._grouped_dgrad_act_kernel, ACT | {"LIMIT": 7.0, "OFFSET": 1.0}),
            ("dgrad_act", grouped_dgrad_act._grouped_dgrad_act_kernel, ACT | {"CURVE": "gelu_tanh"}),
            ("gemm", grouped_gemm._grouped_gemm_kernel, NO_TABLES),
            ("gemm", grouped_gemm._grouped_gemm_kernel, NO_TABLES | NO_BIAS),
            ("fc1_act", grouped_fc1_act._grouped_fc1_act_kernel, ACT | NO_TABLES | NO_BIAS),
            ("dgrad_act", grouped_dgrad_act._grouped_dgrad_act_kernel, ACT | NO_TABLES | NO_BIAS),
        ):
            constants, options = tile_constants(name, dtype, backend)
            yield name, kernel, constants | extra, options, dtype


def compile_variant(kernel, constants, options, dtype, target):
    signature, values = {}, {}
    for name in kernel.arg_names:
        if name.endswith("_desc") and constants[name] is not None:
            signature[name] = constants[name]
        elif name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        elif name.endswith(("_r", "_e", "_n", "_k", "_h", "_g", "_f")) and name.startswith("stride"):
            last = {"stride_w_k", "stride_w_h", "stride_dw_k", "stride_w_f"}
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
    for kernel_name, kernel, constants, options, dtype in variants(name, target.backend):
        compiled = compile_variant(kernel, constants, options, dtype, target)
        registers, spill = resources(compiled)
        shared = compiled.metadata.shared
        row = {"kernel": kernel_name, "dtype": dtype, "registers": registers}
        rows.append(row | {"spill_bytes": spill, "shared_bytes": shared})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
