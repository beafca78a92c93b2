"""Fetches data sets into the cache: `python -m fcjax.data mnist cifar10`."""

import argparse
import sys
import time

from fcjax.data import DataError, known, load, prepare


def main(argv: list[str] | None = None, program: str = "python -m fcjax.data") -> int:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Fetches data sets, verifies them and stores them in the cache.",
        epilog=f"example: {program} mnist cifar10",
    )
    names = ", ".join(known.NAMES)
    parser.add_argument("name", nargs="+", help=f"{names}, or any data set that TFDS has prepared on this machine")
    parser.add_argument("--cache-dir", help="cache folder (default: FCJAX_CACHE_DIR, or the user's cache folder)")
    parser.add_argument("--tfds", action="store_true", help="also write TFDS records, for other programs")
    args = parser.parse_args(argv)
    for name in args.name:
        start = time.perf_counter()
        try:
            dataset = load(name, args.cache_dir)
            records = prepare(name, args.cache_dir) if args.tfds else None
        except (DataError, ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        shape = "x".join(map(str, dataset.train_x.shape[1:]))
        print(
            f"{name}: {len(dataset.train_y)}/{len(dataset.test_y)} images of {shape}, {dataset.num_labels} labels, "
            f"from {dataset.source}, in {time.perf_counter() - start:.1f} s"
        )
        for file, checksum in dataset.sha256.items():
            print(f"  sha256 verified: {checksum}  {file}")
        if records:
            print(f"  TFDS records: {records}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
