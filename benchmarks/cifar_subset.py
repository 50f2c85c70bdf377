"""Write the first training images of CIFAR-10, and all or the first held-out ones, as a folder that ``--data`` takes.

    python benchmarks/cifar_subset.py data/cifar10 data/cifar10-10000 --images 10000

The published files have their images in random order, so the first ones have every class about equally often.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyarrow import parquet


def write_subset(source: Path, target: Path, images: int, held_out: int | None = None) -> None:
    """Copy both splits of a folder in hub layout, cut to their first ``images`` and ``held_out`` rows; None for all."""
    for split, most in (("train", images), ("test", held_out)):
        files = sorted(source.glob(f"**/{split}-*.parquet"))
        if len(files) != 1:
            raise SystemExit(f"{source} has {len(files)} files {split}-*.parquet, and not one")
        place = target / files[0].relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(parquet.read_table(files[0]).slice(0, most), place)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--held-out", type=int, help="default: all")
    given = parser.parse_args()
    write_subset(given.source, given.target, given.images, given.held_out)


if __name__ == "__main__":
    main()
