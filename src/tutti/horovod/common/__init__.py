"""Names of ``horovod.common``."""
