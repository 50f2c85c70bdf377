"""``import horovod`` in processes that ``multiprocessing`` starts anew, to which it passes ``sys.path`` alone."""

from __future__ import annotations

from tutti.horovod.installing import serve_spawned

if __name__ == "horovod":
    serve_spawned()
