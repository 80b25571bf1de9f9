"""Builds and searches of shine, hnswlib, usearch and hnsw_rs beside each other; called by scripts/bench.sh.

Every contender gets the same rows, queries, m = 16, ef_construction = 200 and two threads to build, and searches with one
thread. Rounds are interleaved and their order rotates, so that a slow minute of the machine meets all alike. Searches are
compared by processor time at the smallest ef with recall@10 >= the target; builds by wall time, with processor time beside.
Recall counts an answer that is no farther than the true tenth, so that ties do not matter.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import tempfile
import time
from importlib.metadata import version

import hnswlib
import numpy as np
from usearch.index import Index

K, M, EF_CONSTRUCTION, THREADS = 10, 16, 200, 2
RECALL_EF = 120
ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_bytes(path, rows):
    """The first rows of an i8bin or u8bin file."""
    count, dim = np.fromfile(path, "<u4", 2)
    if rows > count:
        raise SystemExit(f"bench: {path} has {count} rows, {rows} are wanted")
    dtype = {".i8bin": np.int8, ".u8bin": np.uint8}[pathlib.Path(path).suffix]
    return np.fromfile(path, dtype, rows * int(dim), offset=8).reshape(rows, int(dim))


class Truth:
    """Exact distances, in whole numbers."""

    def __init__(self, base, queries):
        self.base, self.queries = base.astype(np.int32), queries.astype(np.int32)
        # Sums stay below 2^24 for up to 256 dimensions: f32 products are exact.
        if base.shape[1] > 256:
            raise SystemExit("bench: at most 256 dimensions")
        base, norms = base.astype(np.float32), (self.base**2).sum(1).astype(np.float32)
        self.limits = np.empty(len(queries), np.int64)
        for start in range(0, len(queries), 200):
            part = queries[start : start + 200].astype(np.float32)
            scores = norms - 2.0 * (part @ base.T)
            nearest = np.partition(scores, K - 1, axis=1)[:, K - 1].astype(np.int64)
            self.limits[start : start + 200] = nearest + (part.astype(np.int64) ** 2).sum(1)

    def recall(self, rows):
        rows = np.asarray(rows, np.int64).reshape(len(self.queries), K)
        found = ((self.base[rows] - self.queries[:, None, :]) ** 2).sum(2)
        return float((found <= self.limits[:, None]).mean())


class Hnswlib:
    name, dtype, family = "hnswlib f32", "f32", "hnswlib"

    def __init__(self, base, queries):
        self.base, self.queries = base.astype(np.float32), queries.astype(np.float32)

    def build(self, seed):
        self.index = None
        wall, cpu = time.perf_counter(), time.process_time()
        index = hnswlib.Index("l2", self.base.shape[1])
        index.init_index(len(self.base), M=M, ef_construction=EF_CONSTRUCTION, random_seed=seed)
        index.add_items(self.base, num_threads=THREADS)
        times = time.perf_counter() - wall, time.process_time() - cpu
        self.index = index
        return times

    def search(self, ef, want_rows=False):
        self.index.set_ef(ef)
        self.index.knn_query(self.queries[: len(self.queries) // 10], K, num_threads=1)
        cpu = time.process_time()
        rows, _ = self.index.knn_query(self.queries, K, num_threads=1)
        cpu = time.process_time() - cpu
        return cpu, rows, None


class Usearch:
    family = "usearch"

    def __init__(self, base, queries, dtype):
        self.name, self.dtype = f"usearch {dtype}", dtype
        as_type = np.float32 if dtype == "f32" else np.int8
        self.base, self.queries = base.astype(as_type), queries.astype(as_type)

    def build(self, seed):
        self.index = None
        keys = np.arange(len(self.base), dtype=np.uint64)
        wall, cpu = time.perf_counter(), time.process_time()
        index = Index(
            ndim=self.base.shape[1], metric="l2sq", dtype=self.dtype, connectivity=M, expansion_add=EF_CONSTRUCTION
        )
        index.add(keys, self.base, threads=THREADS)
        times = time.perf_counter() - wall, time.process_time() - cpu
        self.index = index
        return times

    def search(self, ef, want_rows=False):
        self.index.expansion_search = ef
        self.index.search(self.queries[: len(self.queries) // 10], K, threads=1)
        cpu = time.process_time()
        found = self.index.search(self.queries, K, threads=1)
        cpu = time.process_time() - cpu
        return cpu, found.keys, found.computed_distances / len(self.queries)


class Rust:
    """The bench `peers` of shine-cn: shine itself and hnsw_rs."""

    def __init__(self, base, rows, queries, count):
        built = subprocess.run(
            "cargo bench --locked --workspace --bench peers --no-run --message-format=json".split(),
            cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True,
        )
        messages = (json.loads(line) for line in built.stdout.splitlines() if line.startswith("{"))
        binary = next(m["executable"] for m in messages if m.get("target", {}).get("name") == "peers")
        self.process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.count = count
        self.rows = os.path.join(tempfile.mkdtemp(prefix="shine-bench-"), "rows")
        self.simd = self.ask("data", base, rows, queries, count)["simd"]

    def ask(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: peers ended at '{' '.join(map(str, words))}'")
        return json.loads(line)


class Shine:
    family = "shine"

    def __init__(self, rust, place, dtype):
        self.rust, self.place, self.dtype = rust, place, dtype
        self.name = "hnsw_rs f32" if place == "hnsw_rs" else f"shine {dtype} {place}"
        self.family = "hnsw_rs" if place == "hnsw_rs" else "shine"
        self.index = "hnsw_rs" if place == "hnsw_rs" else f"{place}/{dtype}"

    def build(self, seed):
        times = self.rust.ask("build", "hnsw_rs" if self.place == "hnsw_rs" else self.dtype, seed)
        return times["wall"], times["cpu"]

    def search(self, ef, want_rows=False):
        done = self.rust.ask("search", self.index, ef, *([self.rust.rows] if want_rows else []))
        rows = np.fromfile(self.rust.rows, "<u4") if want_rows else None
        return done["cpu"], rows, done["distances"] / self.rust.count or None


def smallest_ef(contender, truth, target):
    """The smallest ef that reaches the target, its recall, and the distances it takes."""
    low, high, best = K, 640, None
    while low <= high:
        # The answer lies near 120 on the data that this was made for.
        ef = RECALL_EF if best is None and high == 640 and low == K else (low + high) // 2
        _, rows, distances = contender.search(ef, want_rows=True)
        recall = truth.recall(rows)
        if recall >= target:
            best, high = (ef, recall, distances), ef - 1
        else:
            low = ef + 1
    if best is None:
        raise SystemExit(f"bench: {contender.name} does not reach recall {target} at ef 640")
    return best


def interval(ratios, rng):
    """Median and its 95 % bootstrap interval."""
    draws = rng.choice(ratios, (20_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def ratio_lines(pairs, times, rng, lines, results, kind):
    for ours, peer, goal in pairs:
        if ours not in times or peer not in times:
            continue
        median, low, high = interval(np.array(times[peer]) / np.array(times[ours]), rng)
        met = "" if goal is None else f"goal {goal}: {'met' if median >= goal else 'missed'}"
        lines.append(f"{kind:<12} {ours:<18} / {peer:<12} {median:6.2f}  [{low:.2f}, {high:.2f}]  {met}".rstrip())
        results.append(
            {"kind": kind, "ours": ours, "peer": peer, "median": median, "low": low, "high": high, "goal": goal}
        )


def host(dim):
    """What the figures were taken on."""
    cpu = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    library = pathlib.Path(hnswlib.__file__)
    if library.suffix != ".so":
        library = next(library.parent.glob("*.so"))
    code = library.read_bytes()
    # PyPI has its source alone, which pip builds with -march=native unless HNSWLIB_NO_NATIVE is set.
    widest = next((name for name in ("AVX512", "AVX") if f"SIMD16Ext{name}".encode() in code), "SSE")
    kernel = widest if dim % 16 == 0 or dim % 4 else "SSE"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "commit": git.stdout.strip(),
        "hnswlib": f"{version('hnswlib')}, built here from source with {widest}; its L2 for {dim} elements uses {kernel}",
        "usearch": version("usearch"),
    }


def main():
    data = pathlib.Path(os.environ.get("SHINE_DATA") or pathlib.Path.home() / ".cache/shine/data") / "glove100"
    parser = argparse.ArgumentParser(prog="scripts/bench.sh", description=__doc__)
    parser.add_argument("--base", default=data / "base.i8bin", type=pathlib.Path)
    parser.add_argument("--queries", default=data / "query.i8bin", type=pathlib.Path)
    parser.add_argument("--rows", type=int, help="rows of the base (100,000)")
    parser.add_argument("--count", type=int, help="queries (2,000)")
    parser.add_argument("--builds", type=int, help="rounds of builds (5)")
    parser.add_argument("--rounds", type=int, help="rounds of searches (9)")
    parser.add_argument("--recall", type=float, default=0.95, help="recall@10 that searches are compared at")
    parser.add_argument("--only", help="contenders: those whose name has one of these words (comma between)")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, 1,000 queries, 1 build, 5 rounds")
    parser.add_argument("--out", default=ROOT / "out/bench/peers.json", type=pathlib.Path)
    args = parser.parse_args()
    rows = args.rows or (20_000 if args.quick else 100_000)
    count = args.count or (1_000 if args.quick else 2_000)
    builds = args.builds or (1 if args.quick else 5)
    rounds = args.rounds or (5 if args.quick else 9)
    if not args.base.exists():
        raise SystemExit(f"bench: no {args.base}: scripts/data.sh makes it (SHINE_DATA says where)")

    base, queries = read_bytes(args.base, rows), read_bytes(args.queries, count)
    about = host(base.shape[1])
    rust = Rust(args.base, rows, args.queries, count)
    about["shine_simd"] = rust.simd
    print(f"bench: {rows} x {base.shape[1]} of {args.base.name}, {count} queries, m {M}, ef_construction "
          f"{EF_CONSTRUCTION}, {THREADS} threads to build", flush=True)
    for key, value in about.items():
        print(f"  {key}: {value}")
    truth = Truth(base, queries)
    contenders = [
        Shine(rust, "region", "f32"),
        Shine(rust, "file", "f32"),
        Hnswlib(base, queries),
        Usearch(base, queries, "f32"),
        Shine(rust, "hnsw_rs", "f32"),
        Shine(rust, "region", "i8"),
        Shine(rust, "file", "i8"),
        Usearch(base, queries, "i8"),
    ]
    if args.only:
        contenders = [c for c in contenders if any(word in c.name for word in args.only.split(","))]
    # A graph of ours is built once, for both places.
    builders = [c for c in contenders if getattr(c, "place", "") != "file"]
    rng = np.random.default_rng(1)
    ratios, lines = [], []

    wall, cpu, recalls = ({c.name: [] for c in builders} for _ in range(3))
    for turn in range(builds):
        for at in range(len(builders)):
            builder = builders[(at + turn) % len(builders)]
            seconds, processor = builder.build(turn + 1)
            _, answer, _ = builder.search(RECALL_EF, want_rows=True)
            recall = truth.recall(answer)
            wall[builder.name].append(seconds)
            cpu[builder.name].append(processor)
            recalls[builder.name].append(recall)
            print(f"build {turn + 1}/{builds}  {builder.name:<18} {seconds:6.1f} s, {processor:6.1f} s of processors, "
                  f"recall@{K} {recall:.4f} at ef {RECALL_EF}", flush=True)
    lines.append(f"\n{'build':<31} {'s':>6} {'cpu s':>7} {f'recall@{K} at ef {RECALL_EF}':>22}")
    for name in wall:
        lines.append(f"{name:<31} {np.median(wall[name]):6.1f} {np.median(cpu[name]):7.1f} {np.mean(recalls[name]):22.4f}")
    lines.append("")
    build_pairs = [
        ("shine f32 region", "hnswlib f32", 0.9),
        ("shine f32 region", "hnsw_rs f32", 2.5),
        ("shine f32 region", "usearch f32", None),
        ("shine i8 region", "usearch i8", None),
    ]
    ratio_lines(build_pairs, wall, rng, lines, ratios, "build")
    ratio_lines(build_pairs, cpu, rng, lines, ratios, "build, cpu")

    chosen = {}
    for contender in contenders:
        chosen[contender.name] = smallest_ef(contender, truth, args.recall)
        print(f"ef    {contender.name:<18} {chosen[contender.name][0]} for recall@{K} {chosen[contender.name][1]:.4f}", flush=True)
    times = {c.name: [] for c in contenders}
    for turn in range(rounds):
        for at in range(len(contenders)):
            contender = contenders[(at + turn) % len(contenders)]
            times[contender.name].append(contender.search(chosen[contender.name][0])[0])
        print(f"round {turn + 1}/{rounds}  " + "  ".join(f"{n} {t[-1] / count * 1e6:.0f} us" for n, t in times.items()),
              flush=True)
    lines.append(f"\n{'search, one thread':<31} {'ef':>4} {f'recall@{K}':>10} {'us':>7} {'queries/s':>10} {'distances':>10}")
    for name, taken in times.items():
        ef, recall, distances = chosen[name]
        micros = np.median(taken) / count * 1e6
        told = f"{distances:10.0f}" if distances else f"{'not told':>10}"
        lines.append(f"{name:<31} {ef:>4} {recall:10.4f} {micros:7.1f} {1e6 / micros:10.0f} {told}")
    lines.append("")
    search_pairs = [
        ("shine f32 region", "hnswlib f32", 1.0),
        ("shine f32 region", "hnsw_rs f32", 3.0),
        ("shine f32 region", "usearch f32", None),
        ("shine f32 file", "hnswlib f32", None),
        ("shine i8 region", "usearch i8", None),
        ("shine i8 file", "usearch i8", None),
    ]
    ratio_lines(search_pairs, times, rng, lines, ratios, "search")

    about["load_after"] = os.getloadavg()[0]
    print("\n".join(lines))
    print("\nRatios are speeds, ours / theirs: median of the rounds [95 % bootstrap interval].")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "host": about,
        "data": {"base": args.base.name, "rows": rows, "queries": count},
        "parameters": {"m": M, "ef_construction": EF_CONSTRUCTION, "build_threads": THREADS, "k": K},
        "build": {n: {"wall_s": wall[n], "cpu_s": cpu[n], f"recall_at_ef_{RECALL_EF}": recalls[n]} for n in wall},
        "search": {
            n: {"ef": chosen[n][0], "recall": chosen[n][1], "distances": chosen[n][2], "cpu_s": t} for n, t in times.items()
        },
        "ratios": ratios,
    }, indent=1) + "\n")
    print(f"bench: all figures are in {args.out}")


if __name__ == "__main__":
    main()
