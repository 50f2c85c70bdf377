"""Compiled C++ loops with their PyTorch fallback."""
