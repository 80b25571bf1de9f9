//! The part of Qdrant's REST form that this API speaks, translated to and from the node's own words. Pure.
//!
//! | Qdrant | here |
//! | --- | --- |
//! | distance Euclid, Dot, Cosine | metric l2, ip, cosine |
//! | score | √ of the distance, minus it, 1 − it: as Qdrant gives them |
//! | datatype float32, float16, uint8; int8 is ours | element type f32, f16, u8, i8 |
//! | m, ef_construct | m, ef_construction |
//!
//! Invariant: what a request says and this API does not do is an error that names the field.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Value, json};
use shine_common::ids::ExternalId;
use shine_common::layout::{EF_MAX, M_RANGE};
use shine_common::metric::{DIMENSION_MAX, DType, Metric, from_f64, to_f32, validate};
use shine_common::wire::{CollectionInfo, CollectionSpec, CollectionState, Fault};

use super::fields::{Field, Object};

/// Rows that a collection is planned for unless it says more: its id table then takes 18 MB, and ten times as many rows
/// still have short chains.
const CAPACITY: u64 = 1_000_000;
/// Qdrant's own defaults.
const M: u64 = 16;
const EF_CONSTRUCT: u64 = 100;
const LIMIT: u64 = 10;
/// Most points of one upsert, and ids of one retrieve.
pub(super) const POINTS_MAX: usize = 65_536;
/// Most searches of one batch.
pub(super) const SEARCHES_MAX: usize = 1_024;

const NO_PAYLOAD: &str = "payloads are not supported yet: leave it out";
const NO_FILTER: &str = "filters are not supported yet: leave it out";
const NAMED: &str = "named, sparse and multiple vectors are not supported: expected an array of numbers";

fn metric_name(metric: Metric) -> &'static str {
    match metric {
        Metric::L2 => "Euclid",
        Metric::Ip => "Dot",
        Metric::Cosine => "Cosine",
    }
}

fn datatype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::U8 => "uint8",
        DType::I8 => "int8",
    }
}

/// How Qdrant would rate a distance of ours: Euclid from 0 up, nearest first; Dot and Cosine from the highest down.
pub(super) fn score(metric: Metric, distance: f32) -> f32 {
    match metric {
        // Sums of floats may end a hair below zero.
        Metric::L2 => distance.max(0.0).sqrt(),
        // Without a −0.
        Metric::Ip => 0.0 - distance,
        Metric::Cosine => 1.0 - distance,
    }
}

/// Whether a score is at least as good as the threshold. A score that was answered passes itself: printed as the shortest
/// number that means it in single precision, it comes back as another one in double.
pub(super) fn passes(metric: Metric, score: f32, threshold: Option<f64>) -> bool {
    threshold.map(|threshold| threshold as f32).is_none_or(|threshold| match metric {
        Metric::L2 => score <= threshold,
        Metric::Ip | Metric::Cosine => score >= threshold,
    })
}

// ---------------------------------------------------------------------------------------------- collections

/// A field that may only say what is so anyway.
fn only(object: &Object<'_>, name: &str, allowed: u64) -> Result<(), Fault> {
    match object.get(name) {
        Some(field) => field.uint(allowed..=allowed).map(|_| ()),
        None => Ok(()),
    }
}

/// `PUT /collections/NAME`.
pub(super) fn create(name: &str, body: &[u8]) -> Result<CollectionSpec, Fault> {
    let object = Field::body(body)?.object(&[
        "vectors",
        "hnsw_config",
        "capacity",
        "shard_number",
        "replication_factor",
        "write_consistency_factor",
        "on_disk_payload",
        "sharding_method",
        "optimizers_config",
        "wal_config",
        "quantization_config",
        "sparse_vectors",
        "strict_mode_config",
        "init_from",
        "metadata",
    ])?;
    object.refuse(
        &[
            "sharding_method",
            "optimizers_config",
            "wal_config",
            "quantization_config",
            "sparse_vectors",
            "strict_mode_config",
            "init_from",
            "metadata",
        ],
        "not supported: leave it out",
    )?;
    for name in ["shard_number", "replication_factor", "write_consistency_factor"] {
        only(&object, name, 1)?;
    }
    // There are no payloads to put anywhere.
    object.get("on_disk_payload").map(|field| field.boolean()).transpose()?;
    let vectors = object.need("vectors", "an object with size and distance")?;
    let any = vectors.map()?;
    if !any.has("size") && !any.has("distance") {
        return Err(
            vectors.wrong("named vectors are not supported: expected an object with size and distance")
        );
    }
    let vector = vectors.object(&[
        "size",
        "distance",
        "datatype",
        "hnsw_config",
        "on_disk",
        "quantization_config",
        "multivector_config",
    ])?;
    vector.refuse(&["quantization_config", "multivector_config"], "not supported: leave it out")?;
    if let Some(field) = vector.get("on_disk")
        && field.boolean()?
    {
        return Err(field.wrong("not supported: vectors lie in the memory of memory nodes"));
    }
    let dim =
        vector.need("size", "the number of elements of a vector")?.uint(1..=DIMENSION_MAX as u64)? as u32;
    let distance = vector.need("distance", "Euclid, Dot or Cosine")?;
    let metric = match distance.text()?.as_str() {
        "Euclid" => Metric::L2,
        "Dot" => Metric::Ip,
        "Cosine" => Metric::Cosine,
        _ => return Err(distance.expected("Euclid, Dot or Cosine")),
    };
    let dtype = match vector.get("datatype") {
        None => DType::F32,
        Some(field) => match field.text()?.as_str() {
            "float32" => DType::F32,
            "float16" => DType::F16,
            "uint8" => DType::U8,
            "int8" => DType::I8,
            _ => return Err(field.expected("float32, float16, uint8 or int8")),
        },
    };
    let (mut m, mut ef_construct) = (M, EF_CONSTRUCT);
    // What is said of the vector wins over what is said of the collection.
    for config in [object.get("hnsw_config"), vector.get("hnsw_config")].into_iter().flatten() {
        let hnsw = config.object(&[
            "m",
            "ef_construct",
            "full_scan_threshold",
            "max_indexing_threads",
            "on_disk",
            "payload_m",
            "inline_storage",
        ])?;
        hnsw.refuse(
            &["full_scan_threshold", "max_indexing_threads", "on_disk", "payload_m", "inline_storage"],
            "not supported: leave it out",
        )?;
        if let Some(field) = hnsw.get("m") {
            m = field.uint(u64::from(*M_RANGE.start())..=u64::from(*M_RANGE.end()))?;
        }
        if let Some(field) = hnsw.get("ef_construct") {
            ef_construct = field.uint(1..=u64::from(EF_MAX))?;
        }
    }
    let capacity = object.get("capacity").map(|field| field.uint(1..=u64::from(u32::MAX))).transpose()?;
    Ok(CollectionSpec {
        name: name.to_owned(),
        dtype,
        metric,
        dim,
        m: m as u32,
        ef_construction: ef_construct as u32,
        capacity: capacity.unwrap_or(CAPACITY),
        memory_nodes: Vec::new(),
        loading: false,
    })
}

/// `GET /collections/NAME`. What Qdrant has and we do not is told as it would be there with nothing set; what we have and
/// Qdrant does not stands under `shine`.
pub(super) fn describe(info: &CollectionInfo) -> Value {
    let mut vectors = json!({ "size": info.dimension, "distance": metric_name(info.metric) });
    // A name that is not one of Qdrant's: its clients refuse the whole answer.
    if info.dtype != DType::I8 {
        vectors["datatype"] = datatype_name(info.dtype).into();
    }
    let (status, optimizer) = match (info.lost_region, info.state) {
        (Some(region), _) => {
            ("red", json!({ "error": format!("the content of region r{region} is gone: load it again") }))
        }
        (None, CollectionState::Ready) => ("green", json!("ok")),
        (None, _) => ("yellow", json!("ok")),
    };
    json!({
        "status": status,
        "optimizer_status": optimizer,
        "points_count": info.vectors,
        "indexed_vectors_count": info.vectors,
        "segments_count": info.regions.len(),
        "config": {
            "params": {
                "vectors": vectors,
                "shard_number": 1,
                "replication_factor": 1,
                "write_consistency_factor": 1,
                "on_disk_payload": false,
            },
            "hnsw_config": { "m": info.m, "ef_construct": info.ef_construction, "full_scan_threshold": 0 },
            "optimizer_config": {
                "deleted_threshold": 0.0,
                "vacuum_min_vector_number": 0,
                "default_segment_number": 0,
                "flush_interval_sec": 0,
            },
            "wal_config": { "wal_capacity_mb": 0, "wal_segments_ahead": 0 },
        },
        "payload_schema": {},
        "shine": info,
    })
}

// --------------------------------------------------------------------------------------------------- points

/// What a collection's vectors must be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form<'a> {
    pub(super) collection: &'a str,
    pub(super) dtype: DType,
    pub(super) metric: Metric,
    pub(super) dim: u32,
}

impl Form<'_> {
    /// A vector in native form.
    fn vector(&self, field: &Field<'_>) -> Result<Vec<u8>, Fault> {
        if field.is_object() {
            return Err(field.wrong(NAMED));
        }
        let numbers = field.numbers()?;
        if numbers.len() != self.dim as usize {
            return Err(field.wrong(format_args!(
                "has {} elements; collection '{}' holds vectors of {}",
                numbers.len(),
                self.collection,
                self.dim
            )));
        }
        let vector = from_f64(self.dtype, &numbers).map_err(|why| field.wrong(why))?;
        validate(self.metric, self.dtype, &vector).map_err(|why| field.wrong(why))?;
        Ok(vector)
    }

    pub(super) fn vector_bytes(&self) -> usize {
        self.dim as usize * self.dtype.size()
    }
}

/// A point to store.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    pub(super) id: ExternalId,
    pub(super) vector: Vec<u8>,
}

/// `PUT /collections/NAME/points`: all points, checked. Of several with one id the last counts, as if they had been stored
/// one after another.
pub(super) fn upsert(form: &Form<'_>, body: &[u8]) -> Result<Vec<Row>, Fault> {
    let object =
        Field::body(body)?.object(&["points", "batch", "shard_key", "update_filter", "update_mode"])?;
    object.refuse(&["shard_key", "update_filter", "update_mode"], "not supported: leave it out")?;
    let (field, rows) = match (object.get("points"), object.get("batch")) {
        (Some(points), None) => {
            let items = points.array(POINTS_MAX)?;
            let rows = items.iter().map(|point| row(form, point)).collect::<Result<Vec<_>, _>>()?;
            (points, rows)
        }
        (None, Some(batch)) => {
            let rows = columns(form, &batch)?;
            (batch, rows)
        }
        (Some(_), Some(batch)) => return Err(batch.wrong("points is there too: expected one of the two")),
        (None, None) => return object.need("points", "an array of {id, vector}").map(|_| Vec::new()),
    };
    if rows.is_empty() {
        return Err(field.expected("at least one point"));
    }
    let last: HashMap<ExternalId, usize> = rows.iter().enumerate().map(|(i, row)| (row.id, i)).collect();
    Ok(rows.into_iter().enumerate().filter(|(i, row)| last[&row.id] == *i).map(|(_, row)| row).collect())
}

fn no_payload(field: &Field<'_>) -> Result<(), Fault> {
    // Clients send an empty one where there is none.
    let is_none = field.is_null() || field.is_object() && field.object(&[]).is_ok();
    if is_none { Ok(()) } else { Err(field.wrong(NO_PAYLOAD)) }
}

fn row(form: &Form<'_>, point: &Field<'_>) -> Result<Row, Fault> {
    let object = point.object(&["id", "vector", "payload"])?;
    object.get("payload").map(|field| no_payload(&field)).transpose()?;
    Ok(Row {
        id: object.need("id", "a number or UUID")?.id()?,
        vector: form.vector(&object.need("vector", "an array of numbers")?)?,
    })
}

fn columns(form: &Form<'_>, batch: &Field<'_>) -> Result<Vec<Row>, Fault> {
    let object = batch.object(&["ids", "vectors", "payloads"])?;
    let ids = object.need("ids", "an array of ids")?.array(POINTS_MAX)?;
    let field = object.need("vectors", "an array of vectors")?;
    if field.is_object() {
        return Err(field.wrong(NAMED));
    }
    let vectors = field.array(POINTS_MAX)?;
    if vectors.len() != ids.len() {
        return Err(field.wrong(format_args!("has {} items; batch.ids has {}", vectors.len(), ids.len())));
    }
    if let Some(field) = object.get("payloads") {
        field.array(POINTS_MAX)?.iter().try_for_each(no_payload)?;
    }
    let row = |(id, vector): (&Field<'_>, &Field<'_>)| Ok(Row { id: id.id()?, vector: form.vector(vector)? });
    ids.iter().zip(&vectors).map(row).collect()
}

/// What to look near to.
#[derive(Debug, PartialEq)]
pub(super) enum Near {
    Vector(Vec<u8>),
    /// The point itself is then not an answer.
    Id(ExternalId),
}

/// One search.
#[derive(Debug, PartialEq)]
pub(super) struct Search {
    pub(super) near: Near,
    pub(super) limit: usize,
    pub(super) offset: usize,
    /// `None` is the collection's `ef_construct`, as in Qdrant.
    pub(super) ef: Option<u32>,
    pub(super) threshold: Option<f64>,
    pub(super) with_vectors: bool,
}

impl Search {
    /// Answers to ask the node for.
    pub(super) fn k(&self) -> u32 {
        let own = usize::from(matches!(self.near, Near::Id(_)));
        (self.limit + self.offset + own).min(EF_MAX as usize) as u32
    }
}

/// `POST /collections/NAME/points/query`.
pub(super) fn search(form: &Form<'_>, body: &[u8]) -> Result<Search, Fault> {
    one_search(form, &Field::body(body)?)
}

/// `POST /collections/NAME/points/query/batch`.
pub(super) fn searches(form: &Form<'_>, body: &[u8]) -> Result<Vec<Search>, Fault> {
    let field = Field::body(body)?.object(&["searches"])?.need("searches", "an array of queries")?;
    let searches = field.array(SEARCHES_MAX)?;
    let searches: Vec<_> = searches.iter().map(|one| one_search(form, one)).collect::<Result<_, _>>()?;
    let wanted: u64 = searches.iter().map(|search| u64::from(search.k())).sum();
    if wanted > u64::from(EF_MAX) {
        return Err(
            field.wrong(format_args!("limits and offsets add up to {wanted}; expected at most {EF_MAX}"))
        );
    }
    Ok(searches)
}

fn one_search(form: &Form<'_>, field: &Field<'_>) -> Result<Search, Fault> {
    let object = field.object(&[
        "query",
        "params",
        "limit",
        "offset",
        "score_threshold",
        "with_payload",
        "with_vector",
        "filter",
        "prefetch",
        "using",
        "lookup_from",
        "shard_key",
    ])?;
    object.refuse(&["filter"], NO_FILTER)?;
    object.refuse(&["using"], "named vectors are not supported: leave it out")?;
    object.refuse(&["prefetch", "lookup_from", "shard_key"], "not supported: leave it out")?;
    let query = object.need("query", "a vector, or the id of a point")?;
    let nearest = if query.is_object() {
        let any = query.map()?;
        match any.get("nearest") {
            Some(nearest) => {
                query.object(&["nearest"])?;
                nearest
            }
            None => return Err(query.expected("a vector, the id of a point, or {\"nearest\": one of these}")),
        }
    } else {
        query
    };
    let near = if nearest.is_array() || nearest.is_object() {
        Near::Vector(form.vector(&nearest)?)
    } else {
        Near::Id(nearest.id()?)
    };
    let mut ef = None;
    if let Some(params) = object.get("params") {
        let params = params.object(&["hnsw_ef", "exact", "indexed_only", "quantization", "acorn"])?;
        params.refuse(&["quantization", "acorn"], "not supported: leave it out")?;
        ef = params.get("hnsw_ef").map(|field| field.uint(1..=u64::from(EF_MAX))).transpose()?;
        if let Some(field) = params.get("exact")
            && field.boolean()?
        {
            return Err(field.wrong("exact search is not offered: leave it out, and raise params.hnsw_ef"));
        }
        // Every point is indexed when its upsert is answered.
        params.get("indexed_only").map(|field| field.boolean()).transpose()?;
    }
    let all = u64::from(EF_MAX);
    let limit = object.get("limit").map_or(Ok(LIMIT), |field| field.uint(1..=all))?;
    let offset = object.get("offset").map_or(Ok(0), |field| field.uint(0..=all - limit))?;
    let with_vectors = with_vector(&object)?;
    with_vectors_fit(form, &object, "limit", limit as usize, with_vectors)?;
    Ok(Search {
        near,
        limit: limit as usize,
        offset: offset as usize,
        ef: ef.map(|ef| ef as u32),
        threshold: object.get("score_threshold").map(|field| field.number()).transpose()?,
        with_vectors,
    })
}

/// Bytes of vectors that one answer may carry.
const ANSWER_VECTORS_MAX: usize = 16 << 20;

fn with_vectors_fit(
    form: &Form<'_>,
    object: &Object<'_>,
    name: &str,
    count: usize,
    with_vectors: bool,
) -> Result<(), Fault> {
    let max = (ANSWER_VECTORS_MAX / form.vector_bytes()).max(1);
    match object.get(name) {
        Some(field) if with_vectors && count > max => {
            Err(field
                .wrong(format_args!("with vectors of {} bytes at most {max} points", form.vector_bytes())))
        }
        _ => Ok(()),
    }
}

fn with_vector(object: &Object<'_>) -> Result<bool, Fault> {
    // Of a payload nothing is there, whatever part of it is asked for.
    match object.get("with_vector") {
        None => Ok(false),
        Some(field) if field.is_array() => {
            Err(field.wrong("named vectors are not supported: expected true or false"))
        }
        Some(field) => field.boolean(),
    }
}

/// `POST /collections/NAME/points`: ids, and whether vectors are wanted.
pub(super) fn retrieve(form: &Form<'_>, body: &[u8]) -> Result<(Vec<ExternalId>, bool), Fault> {
    let object = Field::body(body)?.object(&["ids", "with_payload", "with_vector", "shard_key"])?;
    object.refuse(&["shard_key"], "not supported: leave it out")?;
    let ids = object.need("ids", "an array of ids")?.array(POINTS_MAX)?;
    // Without a word about it, Qdrant gives payloads and no vectors.
    let with_vectors = with_vector(&object)?;
    with_vectors_fit(form, &object, "ids", ids.len(), with_vectors)?;
    Ok((ids.iter().map(Field::id).collect::<Result<_, _>>()?, with_vectors))
}

/// One part of a scroll.
#[derive(Debug, PartialEq)]
pub(super) struct Scroll {
    pub(super) offset: Option<ExternalId>,
    pub(super) limit: usize,
    pub(super) with_vectors: bool,
}

/// `POST /collections/NAME/points/scroll`.
pub(super) fn scroll(form: &Form<'_>, body: &[u8]) -> Result<Scroll, Fault> {
    let object = Field::body(body)?.object(&[
        "offset",
        "limit",
        "with_payload",
        "with_vector",
        "filter",
        "order_by",
        "shard_key",
    ])?;
    object.refuse(&["filter"], NO_FILTER)?;
    object.refuse(&["order_by", "shard_key"], "not supported: leave it out")?;
    let limit = object.get("limit").map_or(Ok(LIMIT), |field| field.uint(1..=u64::from(EF_MAX)))? as usize;
    let with_vectors = with_vector(&object)?;
    with_vectors_fit(form, &object, "limit", limit, with_vectors)?;
    Ok(Scroll { offset: object.get("offset").map(|field| field.id()).transpose()?, limit, with_vectors })
}

/// `POST /collections/NAME/points/count`: whether the count shall be exact.
pub(super) fn count(body: &[u8]) -> Result<bool, Fault> {
    let object = Field::body(body)?.object(&["exact", "filter", "shard_key"])?;
    object.refuse(&["filter"], NO_FILTER)?;
    object.refuse(&["shard_key"], "not supported: leave it out")?;
    object.get("exact").map_or(Ok(true), |field| field.boolean())
}

// -------------------------------------------------------------------------------------------------- answers

/// A point as it is answered. Payloads are there, and always null.
#[derive(Debug, Serialize)]
pub(super) struct Point {
    id: Id,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
    payload: (),
    vector: Option<Vec<f32>>,
}

/// The answers of one search.
#[derive(Debug, Serialize)]
pub(super) struct Points {
    pub(super) points: Vec<Point>,
}

/// One part of a scroll, as it is answered.
#[derive(Debug, Serialize)]
pub(super) struct ScrollPage {
    pub(super) points: Vec<Point>,
    pub(super) next_page_offset: Option<Id>,
}

/// An id as JSON has it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Id {
    Number(u64),
    Text(String),
}

impl From<ExternalId> for Id {
    fn from(id: ExternalId) -> Self {
        match id {
            ExternalId::Num(number) => Self::Number(number),
            ExternalId::Uuid(_) => Self::Text(id.to_string()),
        }
    }
}

impl Point {
    /// A point by itself; `vector` in native form, if it was asked for.
    pub(super) fn record(id: ExternalId, dtype: DType, vector: Option<&[u8]>) -> Self {
        let vector = vector.map(|vector| to_f32(dtype, vector));
        Self { id: id.into(), version: None, score: None, payload: (), vector }
    }

    /// An answer of a search.
    pub(super) fn scored(id: ExternalId, score: f32, dtype: DType, vector: Option<&[u8]>) -> Self {
        Self { version: Some(0), score: Some(score), ..Self::record(id, dtype, vector) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form<'static> = Form { collection: "c", dtype: DType::F32, metric: Metric::L2, dim: 2 };

    fn said<T: std::fmt::Debug>(result: Result<T, Fault>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn collections_are_made_as_qdrants_clients_ask() {
        let spec = create(
            "c",
            br#"{"vectors":{"size":4,"distance":"Euclid"},"hnsw_config":{"m":8,"ef_construct":64}}"#,
        );
        let spec = spec.unwrap();
        assert_eq!((spec.dim, spec.metric, spec.dtype), (4, Metric::L2, DType::F32));
        assert_eq!((spec.m, spec.ef_construction, spec.capacity, spec.loading), (8, 64, CAPACITY, false));
        for (distance, metric) in [("Dot", Metric::Ip), ("Cosine", Metric::Cosine)] {
            for (datatype, dtype) in
                [("float32", DType::F32), ("float16", DType::F16), ("uint8", DType::U8), ("int8", DType::I8)]
            {
                let body = json!({"vectors": {"size": 1, "distance": distance, "datatype": datatype}, "shard_number": 1});
                let spec = create("c", body.to_string().as_bytes()).unwrap();
                assert_eq!((spec.metric, spec.dtype, spec.m, spec.ef_construction), (metric, dtype, 16, 100));
            }
        }
        for (body, part) in [
            (r#"{}"#, "vectors: missing"),
            (
                r#"{"vectors":{"image":{"size":4,"distance":"Dot"}}}"#,
                "vectors: named vectors are not supported",
            ),
            (
                r#"{"vectors":{"size":0,"distance":"Dot"}}"#,
                "vectors.size: expected a whole number, 1 to 32768, got 0",
            ),
            (r#"{"vectors":{"size":4}}"#, "vectors.distance: missing; expected Euclid"),
            (
                r#"{"vectors":{"size":4,"distance":"Manhattan"}}"#,
                "vectors.distance: expected Euclid, Dot or Cosine",
            ),
            (
                r#"{"vectors":{"size":4,"distance":"Dot","datatype":"f8"}}"#,
                "vectors.datatype: expected float32",
            ),
            (r#"{"vectors":{"size":4,"distance":"Dot","on_disk":true}}"#, "vectors.on_disk: not supported"),
            (
                r#"{"vectors":{"size":4,"distance":"Dot"},"hnsw_config":{"m":0}}"#,
                "hnsw_config.m: expected a whole number, 2",
            ),
            (
                r#"{"vectors":{"size":4,"distance":"Dot"},"shard_number":3}"#,
                "shard_number: expected a whole number, 1 to 1",
            ),
            (
                r#"{"vectors":{"size":4,"distance":"Dot"},"sparse_vectors":{"t":{}}}"#,
                "sparse_vectors: not supported",
            ),
            (r#"{"vectors":{"size":4,"distance":"Dot"},"foo":1}"#, "foo: not a field here"),
        ] {
            let message = said(create("c", body.as_bytes()));
            assert!(message.starts_with(part), "{message}");
        }
    }

    #[test]
    fn points_come_as_rows_or_columns_and_the_last_of_an_id_counts() {
        let by_rows = br#"{"points":[{"id":7,"vector":[1,2],"payload":{}},{"id":8,"vector":[3,4]},{"id":7,"vector":[5,6]}]}"#;
        let by_columns =
            br#"{"batch":{"ids":[7,8,7],"vectors":[[1,2],[3,4],[5,6]],"payloads":[null,{},null]}}"#;
        let rows = upsert(&FORM, by_rows).unwrap();
        assert_eq!(rows, upsert(&FORM, by_columns).unwrap());
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, [ExternalId::Num(8), ExternalId::Num(7)]);
        assert_eq!(to_f32(DType::F32, &rows[1].vector), [5.0, 6.0]);
        for (body, part) in [
            (r#"{}"#, "points: missing"),
            (r#"{"points":[]}"#, "points: expected at least one point, got []"),
            (r#"{"points":[{"vector":[1,2]}]}"#, "points[0].id: missing"),
            (r#"{"points":[{"id":1,"vector":[1,2]},{"id":2}]}"#, "points[1].vector: missing"),
            (
                r#"{"points":[{"id":1,"vector":[1,2,3]}]}"#,
                "points[0].vector: has 3 elements; collection 'c' holds vectors of 2",
            ),
            (r#"{"points":[{"id":1,"vector":[1,1e300]}]}"#, "points[0].vector: element 1 is"),
            (r#"{"points":[{"id":1,"vector":[3e38,0]}]}"#, "points[0].vector: the squared norm"),
            (r#"{"points":[{"id":1,"vector":{"a":[1,2]}}]}"#, "points[0].vector: named, sparse"),
            (r#"{"points":[{"id":1,"vector":[[1,2]]}]}"#, "points[0].vector: element 0: expected a number"),
            (
                r#"{"points":[{"id":1,"vector":[1,2],"payload":{"city":"Berlin"}}]}"#,
                "points[0].payload: payloads are not",
            ),
            (r#"{"batch":{"ids":[1],"vectors":[]}}"#, "batch.vectors: has 0 items; batch.ids has 1"),
            (
                r#"{"batch":{"ids":[1],"vectors":[[1,2]],"payloads":[{"a":1}]}}"#,
                "batch.payloads[0]: payloads are not",
            ),
        ] {
            let message = said(upsert(&FORM, body.as_bytes()));
            assert!(message.starts_with(part), "{message}");
        }
        let cosine = Form { metric: Metric::Cosine, ..FORM };
        assert!(
            said(upsert(&cosine, br#"{"points":[{"id":1,"vector":[0,0]}]}"#)).contains("the cosine needs")
        );
    }

    #[test]
    fn searches_say_near_what_and_how() {
        let full = search(
            &FORM,
            br#"{"query":{"nearest":[1,2]},"params":{"hnsw_ef":64,"exact":false},"limit":3,"offset":2,
                "with_payload":true,"with_vector":true,"score_threshold":0.5}"#,
        )
        .unwrap();
        assert_eq!((full.limit, full.offset, full.ef, full.k()), (3, 2, Some(64), 5));
        assert_eq!((full.threshold, full.with_vectors), (Some(0.5), true));
        let bare = search(&FORM, b"{\"query\":[1,2]}").unwrap();
        assert_eq!((bare.limit, bare.offset, bare.ef, bare.with_vectors), (10, 0, None, false));
        let by_id = search(&FORM, b"{\"query\":7}").unwrap();
        assert_eq!(
            (by_id.near, 11),
            (Near::Id(ExternalId::Num(7)), search(&FORM, b"{\"query\":7}").unwrap().k())
        );
        for (body, part) in [
            (r#"{"query":null}"#, "query: missing; expected a vector, or the id"),
            (r#"{"query":{"recommend":{"positive":[1]}}}"#, "query: expected a vector"),
            (r#"{"query":{"nearest":[1,2],"mmr":{}}}"#, "query.mmr: not a field here"),
            (r#"{"query":[1]}"#, "query: has 1 elements; collection 'c' holds vectors of 2"),
            (r#"{"query":"seven"}"#, "query: expected a whole number from 0"),
            (r#"{"query":7,"limit":0}"#, "limit: expected a whole number, 1 to 65536, got 0"),
            (r#"{"query":7,"limit":65537}"#, "limit: expected a whole number, 1 to 65536, got 65537"),
            (r#"{"query":7,"limit":65536,"offset":1}"#, "offset: expected a whole number, 0 to 0"),
            (r#"{"query":7,"params":{"hnsw_ef":0}}"#, "params.hnsw_ef: expected a whole number, 1 to 65536"),
            (r#"{"query":7,"params":{"exact":true}}"#, "params.exact: exact search is not offered"),
            (r#"{"query":7,"filter":{"must":[]}}"#, "filter: filters are not supported"),
            (r#"{"query":7,"using":"image"}"#, "using: named vectors"),
            (r#"{"query":7,"with_vector":["image"]}"#, "with_vector: named vectors"),
        ] {
            let message = said(search(&FORM, body.as_bytes()));
            assert!(message.starts_with(part), "{message}");
        }
        let two = searches(&FORM, br#"{"searches":[{"query":[1,2]},{"query":7,"limit":1}]}"#).unwrap();
        assert_eq!(two.len(), 2);
        let too_many = br#"{"searches":[{"query":[1,2],"limit":65536},{"query":[1,2]}]}"#;
        assert!(said(searches(&FORM, too_many)).contains("add up to 65546"));
        let wide = Form { dim: 32_768, ..FORM };
        let said = said(scroll(&wide, br#"{"limit":129,"with_vector":true}"#));
        assert!(said.contains("limit: with vectors of 131072 bytes at most 128 points"), "{said}");
    }

    #[test]
    fn scores_are_those_of_qdrant() {
        assert_eq!(score(Metric::L2, 25.0), 5.0);
        assert_eq!((score(Metric::Ip, -3.0), score(Metric::Cosine, 0.25)), (3.0, 0.75));
        assert!(score(Metric::Ip, 0.0).is_sign_positive());
        assert!(passes(Metric::L2, 1.0, Some(1.0)) && !passes(Metric::L2, 1.1, Some(1.0)));
        // 0.1 in single precision is more than 0.1 in double.
        assert!(passes(Metric::L2, 0.1, Some(0.1)));
        assert!(passes(Metric::Cosine, 0.9, Some(0.5)) && !passes(Metric::Ip, 0.4, Some(0.5)));
    }
}
