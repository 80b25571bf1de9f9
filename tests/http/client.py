"""The official client of Qdrant against a compute node: client.py URL DATA-FOLDER

Creates collections, upserts, queries, retrieves, scrolls and counts, and holds the answers against exact search. Prints
one line of JSON with what it found; whatever is not as it should be ends it with an error.
"""

import json
import sys
import uuid

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import UnexpectedResponse

ROWS, QUERIES, K = 10_000, 200, 10


def read(path, rows):
    """The first rows of a big-ann file of i8, as float32."""
    n, dim = np.fromfile(path, dtype=np.uint32, count=2)
    assert rows <= n, f"{path} has {n} rows"
    return np.fromfile(path, dtype=np.int8, count=rows * dim, offset=8).reshape(rows, dim).astype(np.float32)


def exact(base, query, distance):
    """All rows by their exact scores, best first."""
    if distance == models.Distance.EUCLID:
        scores = np.sqrt(((base - query) ** 2).sum(axis=1))
        return scores, np.argsort(scores, kind="stable")
    scores = base @ query
    if distance == models.Distance.COSINE:
        scores = scores / np.linalg.norm(base, axis=1) / np.linalg.norm(query)
    return scores, np.argsort(-scores, kind="stable")


def recall(client, name, base, queries, distance):
    """recall@10 by distance (ties are as good), with every score checked."""
    found = 0
    for query in queries:
        scores, order = exact(base, query, distance)
        worst = scores[order[K - 1]]
        answer = client.query_points(
            name, query=query.tolist(), limit=K, search_params=models.SearchParams(hnsw_ef=128)
        ).points
        assert len(answer) == K, answer
        given = [point.score for point in answer]
        assert given == sorted(given, reverse=distance != models.Distance.EUCLID), given
        for point in answer:
            assert abs(point.score - scores[point.id]) <= 1e-4 * max(1.0, abs(scores[point.id])), point
            assert point.payload is None and point.vector is None, point
        slack = 1e-4 * abs(worst)
        if distance == models.Distance.EUCLID:
            found += sum(scores[point.id] <= worst + slack for point in answer)
        else:
            found += sum(scores[point.id] >= worst - slack for point in answer)
    return found / (K * len(queries))


def refused(status, what):
    """What a call that must be refused says."""
    try:
        what()
    except UnexpectedResponse as error:
        assert error.status_code == status, error
        return json.loads(error.content)["status"]["error"]
    raise AssertionError(f"not refused with {status}")


def scroll_all(client, name, limit):
    seen, offset = [], None
    while True:
        points, offset = client.scroll(name, limit=limit, offset=offset, with_vectors=True)
        seen.extend(points)
        if offset is None:
            return seen


def main(url, folder):
    client = QdrantClient(url=url, check_compatibility=False, timeout=120)
    base, queries = read(f"{folder}/base.i8bin", ROWS), read(f"{folder}/query.i8bin", QUERIES)
    dim = base.shape[1]
    out = {}

    # The whole way, with the shipped data.
    euclid = models.Distance.EUCLID
    assert not client.collection_exists("words")
    assert client.create_collection(
        "words",
        vectors_config=models.VectorParams(size=dim, distance=euclid),
        hnsw_config=models.HnswConfigDiff(m=16, ef_construct=100),
    )
    assert client.collection_exists("words")
    assert client.count("words").count == 0
    assert client.query_points("words", query=queries[0].tolist()).points == []
    client.upload_collection("words", vectors=base, ids=range(ROWS), batch_size=500, wait=True)
    assert client.count("words").count == ROWS
    assert client.count("words", exact=False).count == ROWS
    out["recall"] = recall(client, "words", base, queries, euclid)
    assert out["recall"] >= 0.95, out

    by_id = client.query_points("words", query=7, limit=3).points
    scores, order = exact(base, base[7], euclid)
    assert 7 not in [point.id for point in by_id] and by_id[0].id == order[1], by_id
    both = client.query_batch_points(
        "words",
        requests=[
            models.QueryRequest(query=queries[0].tolist(), limit=3, with_vector=True),
            models.QueryRequest(query=7, limit=3),
        ],
    )
    assert [len(answer.points) for answer in both] == [3, 3]
    assert np.array_equal(both[0].points[0].vector, base[both[0].points[0].id])
    records = client.retrieve("words", ids=[3, 99_999_999, 5], with_vectors=True)
    assert [record.id for record in records] == [3, 5], records
    assert np.array_equal(records[0].vector, base[3])
    assert client.retrieve("words", ids=[3])[0].vector is None
    seen = scroll_all(client, "words", 997)
    assert sorted(point.id for point in seen) == list(range(ROWS))
    assert all(np.array_equal(point.vector, base[point.id]) for point in seen[::101])

    info = client.get_collection("words")
    assert info.status == models.CollectionStatus.GREEN and info.points_count == ROWS, info
    assert info.config.params.vectors.size == dim and info.config.hnsw_config.m == 16, info

    # An upsert of what is there replaces it.
    fresh = queries[1].tolist()
    client.upsert("words", points=[models.PointStruct(id=7, vector=fresh)])
    assert client.count("words").count == ROWS
    assert client.retrieve("words", ids=[7], with_vectors=True)[0].vector == fresh
    nearest = client.query_points("words", query=fresh, limit=1).points[0]
    assert (nearest.id, nearest.score) == (7, 0.0), nearest
    assert sum(point.id == 7 for point in scroll_all(client, "words", 4096)) == 1

    # The other metrics and types, with ids of both kinds.
    small, few = base[:500], queries[:20]
    for distance in (models.Distance.DOT, models.Distance.COSINE):
        name = f"by-{distance.value.lower()}"
        client.create_collection(name, vectors_config=models.VectorParams(size=dim, distance=distance))
        client.upsert(name, points=models.Batch(ids=list(range(500)), vectors=small.tolist()))
        out[name] = recall(client, name, small, few, distance)
        assert out[name] >= 0.9, out
    client.create_collection(
        "bytes",
        vectors_config=models.VectorParams(size=3, distance=euclid, datatype=models.Datatype.UINT8),
    )
    key = str(uuid.uuid4())
    client.upsert("bytes", points=[models.PointStruct(id=key, vector=[1, 2, 255])])
    assert client.retrieve("bytes", ids=[key], with_vectors=True)[0].vector == [1, 2, 255]
    assert client.query_points("bytes", query=[1, 2, 250]).points[0].id == key

    # What is not offered says so, and leaves nothing behind.
    def upsert(vector, **more):
        return lambda: client.upsert("words", points=[models.PointStruct(id=ROWS, vector=vector, **more)])

    assert "points[0].payload" in refused(400, upsert(fresh, payload={"city": "Berlin"}))
    assert "points[0].vector: has 2 elements" in refused(400, upsert([1.0, 2.0]))
    assert "points[0].vector" in refused(400, upsert({"image": fresh}))
    assert client.retrieve("words", ids=[ROWS]) == []
    only = models.Filter(must=[models.HasIdCondition(has_id=[1])])
    assert "filter" in refused(400, lambda: client.query_points("words", query=fresh, query_filter=only))
    assert "deleted" in refused(501, lambda: client.delete("words", points_selector=[1]))
    assert "no collection 'nowhere'" in refused(404, lambda: client.query_points("nowhere", query=fresh))
    again = models.VectorParams(size=dim, distance=euclid)
    assert "exists" in refused(409, lambda: client.create_collection("words", vectors_config=again))
    assert "1 to 64" in refused(400, lambda: client.create_collection("a.b", vectors_config=again))
    named = {"image": again}
    assert "vectors" in refused(400, lambda: client.create_collection("named", vectors_config=named))

    names = sorted(collection.name for collection in client.get_collections().collections)
    assert names == ["by-cosine", "by-dot", "bytes", "words"], names
    for name in names:
        assert client.delete_collection(name)
    assert not client.delete_collection("words"), "it is gone"
    assert client.get_collections().collections == []
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
