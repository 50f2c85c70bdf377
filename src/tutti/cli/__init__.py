"""The command line: arguments, refusals and exit codes. Loads no torch."""
