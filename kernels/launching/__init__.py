"""How kernels are launched, remembered, and counted."""
