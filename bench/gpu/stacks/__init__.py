"""Whole models of two layers, trained by the stacks that users have: with a stack's own experts, and with ours."""
