"""fc1 with the activation fused."""
