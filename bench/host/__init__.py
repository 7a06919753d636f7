"""What a layer costs the host, on a CUDA driver that does nothing."""
