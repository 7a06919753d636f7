"""Proof without a GPU that every kernel, as the library launches it, is fit for every GPU that it is shipped for.

`cases` has calls of the `triton` implementation that launch every kernel in every variant; `compiling` compiles the
launches for another GPU and does not run them. `resources`, `cubin` and `assembly` read what compilers report and make;
`proof` judges it, and `hashes` keeps the code of each launch.
"""
