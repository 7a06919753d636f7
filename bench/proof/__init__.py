"""Proof without a GPU that every kernel, as the library launches it, is fit for every GPU that it is shipped for.

`cases` calls the `triton` implementation with every combination of optional inputs; the doctor's `recorder` compiles
what that launches for another GPU instead of running it; `resources` reads the compiler's reports, `cubin` and
`assembly` its binaries and listings, in which `loops` and `main_loop` find what a step costs; `proof` judges them.
`budgets` keeps what each pass may cost, `hashes` which code each launch is.
"""
