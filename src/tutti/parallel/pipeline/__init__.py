"""Pipeline parallelism: replicas cut into stages over several devices."""
