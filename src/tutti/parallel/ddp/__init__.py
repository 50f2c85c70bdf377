"""Whole replicas whose gradients are summed over all workers; the parts that every other strategy is made of."""
