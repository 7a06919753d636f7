"""The model beside measurements that others published: `python -m fusedmlp bench --model --published`.

`points.csv` has a line for each published figure: machine, kernel, sizes and TFLOP/s, with its source; a second reader
compared each with it. Times on the host's clock that include a launch and a synchronization were left out. `loops.csv`
has the costs of each kernel's compiled loop, read by `bench.proof.main_loop` from what Triton 3.7.1 makes of the
published source, and, in place of `mma_in_flight`, the order of loads and products in that source. A loop named "like
..." is one of this library's kernels in place of one that was not compiled.

`use` says what a point is for. fit: constants in `bench.limits.rates` are fitted to it; `half` then says to which half
it belongs, and all sizes of a kernel are in the same half. other: another machine; its clock is set by what cuBLAS
reached there. anchor: cuBLAS, whose kernels are not known; it says how fast a machine is.

`layers.csv` has SonicMoE's layers on an H100, forward and backward, read off Figure 14 of its repository
(Dao-AILab/sonic-moe, assets/tput.png at 8565e849) to 3 TFLOP/s.
"""
