//! Question: what do the encodings on the path of a query cost, next to the distances it computes (10 to 20 ns each)?
//!
//! Estimate: a level-0 list at m 16 is 136 bytes: its checksum 15 ns, its entries 10. A gather of 17 vectors is a frame of
//! 80 bytes to write and to read, 30 ns each. A search request and its ten answers go through rkyv once a query: below a
//! microsecond with validation.
//!
//! `cargo bench -p shine-cn --bench codec`, `-- list` for a part.

mod cpu;

use std::hint::black_box;
use std::time::Duration;

use bytes::BytesMut;
use cpu::ThreadTime;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use shine_common::ids::{Epoch, ExternalId, NodeId, RegionId, RemotePtr};
use shine_common::layout::{ListView, encode_base_list, encode_upper_list};
use shine_common::verbs::ReadBatch;
use shine_common::verbs::frame::{Assembler, ReadRequest, put_read};
use shine_common::wire::{self, CnRequest, CnResponse, Hit, Receipt, Target};

fn lists(criterion: &mut Criterion<ThreadTime>) {
    let mut group = criterion.benchmark_group("list");
    for m in [16, 32] {
        let nodes: Vec<_> = (0..2 * m).map(|at| NodeId(at * 7_919)).collect();
        let mut bytes = vec![0; 8 + 8 * m as usize];
        group.bench_function(BenchmarkId::new("encode", m), |bencher| {
            bencher.iter(|| encode_base_list(&mut bytes, 7, black_box(&nodes)));
        });
        group.bench_function(BenchmarkId::new("check and decode", m), |bencher| {
            bencher.iter(|| {
                let view = ListView::parse_base(black_box(&bytes)).expect("just encoded");
                view.nodes().map(|node| node.0).fold(0, u32::wrapping_add)
            });
        });
        let nodes: Vec<_> = nodes[..m as usize].iter().map(|node| (*node, node.0 / 3)).collect();
        encode_upper_list(&mut bytes, 7, &nodes);
        group.bench_function(BenchmarkId::new("check and decode upper", m), |bencher| {
            bencher.iter(|| {
                let view = ListView::parse_upper(black_box(&bytes)).expect("just encoded");
                view.upper_nodes().map(|(node, upper)| node.0 ^ upper).fold(0, u32::wrapping_add)
            });
        });
    }
    group.finish();
}

fn frames(criterion: &mut Criterion<ThreadTime>) {
    let mut group = criterion.benchmark_group("frame");
    for vectors in [1, 17, 500] {
        let mut batch = ReadBatch::new();
        for at in 0..vectors {
            batch.push(RemotePtr::new(RegionId(3), 4096 + at * 7_912), Epoch(5), 104);
        }
        let mut out = BytesMut::new();
        group.bench_function(BenchmarkId::new("write gather", vectors), |bencher| {
            bencher.iter(|| {
                out.clear();
                put_read(&mut out, 9, black_box(&batch));
                out.len()
            });
        });
        let frame = out.clone().freeze();
        let mut request = ReadRequest::default();
        let mut assembler = Assembler::default();
        group.bench_function(BenchmarkId::new("read gather", vectors), |bencher| {
            bencher.iter(|| {
                assembler.push(frame.clone());
                let frame = assembler.next_frame().expect("a frame").expect("all of it");
                request.decode(&frame.body).expect("a gather");
                request.reply_bytes
            });
        });
    }
    group.finish();
}

fn messages(criterion: &mut Criterion<ThreadTime>) {
    let request = CnRequest::Search {
        collection: "words".into(),
        target: Target::Vector(vec![7; 100]),
        k: 10,
        ef: 120,
        deadline_ms: 0,
        with_vectors: false,
    };
    let hit = |at: u32| Hit {
        id: ExternalId::Num(at.into()),
        node: NodeId(at),
        distance: at as f32,
        vector: Vec::new(),
    };
    let response =
        CnResponse::Hits { hits: (0..10).map(hit).collect(), ef: 120, receipt: Receipt::default() };
    let mut group = criterion.benchmark_group("message");
    group.bench_function("encode search", |bencher| bencher.iter(|| wire::encode(black_box(&request))));
    let bytes = wire::encode(&request);
    group.bench_function("check and decode search", |bencher| {
        bencher.iter(|| wire::decode::<CnRequest>(black_box(&bytes)).expect("just encoded"));
    });
    group.bench_function("encode ten hits", |bencher| bencher.iter(|| wire::encode(black_box(&response))));
    let bytes = wire::encode(&response);
    group.bench_function("check and decode ten hits", |bencher| {
        bencher.iter(|| wire::decode::<CnResponse>(black_box(&bytes)).expect("just encoded"));
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .with_measurement(ThreadTime)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = lists, frames, messages
}
criterion_main!(benches);
