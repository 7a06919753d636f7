"""Proof without a GPU that every kernel, as the library launches it, is fit for every GPU that it is shipped for.

`cases` calls the `triton` implementation with every combination of optional inputs; `recorder` compiles what that
launches for another GPU instead of running it; `resources` reads the compiler's reports; `proof` judges them.
"""
