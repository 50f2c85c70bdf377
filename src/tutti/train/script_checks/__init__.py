"""Watch a script's code while it trains: follow what it reads and writes, and refuse what several devices would change.

A script has its own loss function, loop, optimizers and hooks. The modules here find values that pass from one logical
worker's micro-batch to the next, writes to parameters that ranks do not make alike, losses that mix the samples of a
batch, and other mistakes, in the first steps and at intervals. They raise ``UsageError`` or ``MismatchError`` with the
script's line before the first update that would be wrong.
"""
