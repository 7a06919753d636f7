"""The float64 reference of a layer, in plain PyTorch, and the rule for how far a result may be off it."""
