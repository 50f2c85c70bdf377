"""Records, progress, loggers, profiler, timeline and diagnostics of a run."""
