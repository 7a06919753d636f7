"""Limits of hardware, and how near the kernels come: shapes, GPUs, limit times, schedules, measurements."""
