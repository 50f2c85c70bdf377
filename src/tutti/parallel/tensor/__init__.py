"""Tensor parallelism: replicas whose layers are split over tensor ranks."""
