"""Protocols and records that all rooms share. No torch at run time: ``tutti --help`` imports these modules.

Model layouts, gradient synchronisation and optimizers never import each other; they meet in the protocols of this room.
"Worker" is the logical worker: one of N replicas of the algorithm, of which a rank plays one or several.
"""
