"""What computes, behind operators that PyTorch knows: `ops.py` registers them, `torch_impl.py` and `triton_impl.py`
implement each of them, and `types.py` names what they return. Weights are plain tensors here; that some are parameters,
and where their gradients go, is decided by the callers.
"""
