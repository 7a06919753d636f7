"""Proof without a GPU that every kernel, as the library launches it, is fit for every GPU that it is shipped for.

`cases` has calls of the `triton` implementation that launch every kernel in every variant; `compiling` compiles the
launches for another GPU and does not run them. `resources` reads the compiler's reports, `cubin` and `assembly` its
binaries and listings, in which `loops` and `main_loop` find the costs of a step, `ttgir` Triton's own loops; `proof`
judges them. `budgets` keeps the costs allowed to each pass, `hashes` the code of each launch.
"""
