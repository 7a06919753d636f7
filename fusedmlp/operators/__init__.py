"""The computation, as operators registered with PyTorch: `ops.py` registers them, `torch_impl.py` and `triton_impl.py`
implement each of them, and `types.py` names their results. Weights are plain tensors here; callers decide where the
gradients of parameters go.
"""
