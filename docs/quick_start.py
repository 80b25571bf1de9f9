"""What docs/quick-start.md does from Python: quick_start.py CLUSTER-FILE"""

import json
import sys

from qdrant_client import QdrantClient, models

COLOURS = {
    1: ("red", [255, 0, 0]),
    2: ("green", [0, 255, 0]),
    3: ("blue", [0, 0, 255]),
    4: ("orange", [255, 165, 0]),
    5: ("brown", [165, 42, 42]),
    6: ("navy", [0, 0, 128]),
}

with open(sys.argv[1]) as file:
    url = json.load(file)["http"][0]
client = QdrantClient(url=url, check_compatibility=False)

client.create_collection(
    "colours",
    vectors_config=models.VectorParams(size=3, distance=models.Distance.EUCLID, datatype=models.Datatype.UINT8),
)
client.upsert(
    "colours",
    points=[models.PointStruct(id=id, vector=rgb) for id, (_, rgb) in COLOURS.items()],
)
print(client.count("colours").count, "colours")

answer = client.query_points("colours", query=[220, 20, 60], limit=3)
for point in answer.points:
    print(f"{COLOURS[point.id][0]:6} at distance {point.score:.1f}")
