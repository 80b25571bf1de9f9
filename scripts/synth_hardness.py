#!/usr/bin/env python3
"""Is a made set as hard as the real ones? Makes 100,000 rows and 1,000 queries of a shape, builds hnswlib's graph
(M 16, ef_construction 200), and holds its recall@10 at ef 50, 100, 200 against the figures that the shapes were fitted to.

usage: synth_hardness.py SHINE [--shapes spacev,deep,bigann] [--seed N] [--out FILE.json]

SHINE is the binary `shine`. Exit code 1 if a figure is off by more than 0.02.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import hnswlib
import numpy as np

ROWS, QUERIES, K = 100_000, 1_000, 10
EF = (50, 100, 200)
EXPECTED = {
    "spacev": (0.888, 0.950, 0.979),
    "deep": (0.989, 0.997, 0.999),
    "bigann": (0.979, 0.995, 0.999),
}
TOLERANCE = 0.02
DTYPES = {".i8bin": np.int8, ".u8bin": np.uint8, ".fbin": np.float32}


def read(path):
    path = pathlib.Path(path)
    rows, dim = np.fromfile(path, "<u4", 2)
    return np.fromfile(path, DTYPES[path.suffix], offset=8).reshape(rows, dim).astype(np.float32)


def measure(shine, shape, seed):
    with tempfile.TemporaryDirectory() as folder:
        command = [shine, "--json", "data", "synth", shape, str(ROWS), "--queries", str(QUERIES), "--seed", str(seed)]
        command += ["--truth", str(QUERIES), "--k", str(K), "--out", folder]
        made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        base, queries = read(made["base"]), read(made["queries"])
        truth = np.fromfile(made["truth"]["file"], "<u4", QUERIES * K, offset=8).reshape(QUERIES, K)
    index = hnswlib.Index("l2", base.shape[1])
    index.init_index(len(base), M=16, ef_construction=200, random_seed=1)
    index.add_items(base)
    found = []
    for ef in EF:
        index.set_ef(ef)
        ids, _ = index.knn_query(queries, K)
        found.append(sum(len(np.intersect1d(a, b)) for a, b in zip(ids, truth)) / truth.size)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shine")
    parser.add_argument("--shapes", default=",".join(EXPECTED))
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    results, good = [], True
    print(f"hnswlib {hnswlib.__version__ if hasattr(hnswlib, '__version__') else ''} recall@{K}, {ROWS} rows, M 16, ef_construction 200")
    print(f"{'shape':8} {'ef':>4} {'recall':>7} {'expected':>8} {'off by':>7}")
    for shape in arguments.shapes.split(","):
        for ef, recall, expected in zip(EF, measure(arguments.shine, shape, arguments.seed), EXPECTED[shape]):
            ok = abs(recall - expected) <= TOLERANCE
            good &= ok
            results.append({"shape": shape, "ef": ef, "recall_at_10": recall, "expected": expected, "ok": ok})
            print(f"{shape:8} {ef:4} {recall:7.4f} {expected:8.3f} {recall - expected:+7.4f}{'' if ok else '  TOO FAR'}", flush=True)
    if arguments.out:
        body = {"rows": ROWS, "queries": QUERIES, "seed": arguments.seed, "tolerance": TOLERANCE, "points": results}
        pathlib.Path(arguments.out).write_text(json.dumps(body, indent=2) + "\n")
    sys.exit(0 if good else 1)


main()
