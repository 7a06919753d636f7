"""The gradient contract: where a weight gradient goes, and what backward returns for it.

| case                                               | returned | flag | GEMM                                |
|----------------------------------------------------|----------|------|-------------------------------------|
| plain                                              | wgrad    | -    | overwrite                           |
| delayed                                            | None     | -    | later; adds to or sets `.grad`      |
| `main_grad`, no `grad_added_to_main_grad`          | None     | -    | accumulate                          |
| `main_grad`, has `grad_added_to_main_grad`         | None (1) | True | accumulate                          |
| delayed + `main_grad`, no attribute                | None     | -    | accumulate, later                   |
| delayed + `main_grad`, has the attribute           | None (1) | True | accumulate, later (flag right away) |
| `overwrite_main_grad` on the parameter            | as above | same | overwrite `main_grad`               |

(1) and the dummy, zeros, is set as `.grad` in backward.

With `accumulate_wgrad="grad"`, and "auto" without `main_grad`, the GEMM adds to an existing `.grad`, and backward
returns None. Without a `.grad`, or where a GEMM may not add to it (docs/gradients.md says where), the plain case
applies, and PyTorch adds. The presence of `grad_added_to_main_grad` decides, not its value: Megatron-core's convention.

A gradient is fused (written to `main_grad` or `.grad`) only if the autograd engine will run the parameter's
AccumulateGrad node. Otherwise (`autograd.grad`, `backward(inputs=...)`) the caller asked for the gradient itself, and
backward returns it.

If a backward fails, discard the step: docs/errors_in_backward.md.
"""
