"""The backward of fc2: its input gradient, with the gradients of activation and probabilities fused."""
