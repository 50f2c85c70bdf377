"""Training scripts as data: drawn at random, played under every strategy, and compared with plain PyTorch."""
