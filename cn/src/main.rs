//! `shine-cn`: see `shine-cn --help`.

#![forbid(unsafe_code)]

use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser as _;
use shine_cn::config::{Config, Options};
use shine_cn::http::Http;
use shine_cn::serve::{ComputeNode, Setup};
use shine_common::config::{ReadyLine, init_logs, stop_signal};
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::tls::Identity;
use shine_common::wire::Role;

/// Time that an oracle has to appear, so that processes may start in any order.
const JOIN_TIME: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match start(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shine-cn: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: Options) -> anyhow::Result<()> {
    let config = options.load()?;
    init_logs(&config.log)?;
    let runtime = if config.threads == 1 {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?
    } else {
        tokio::runtime::Builder::new_multi_thread().worker_threads(config.threads).enable_all().build()?
    };
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let identity = Identity::load(&config.cert_dir)?.expect_role(Role::Cn)?;
    let name = identity.name().to_string();
    if let Some(given) = config.name
        && given != name
    {
        anyhow::bail!("--name {given}: the certificate in {} is for '{name}'", config.cert_dir.display());
    }
    let signal = stop_signal()?;
    let stop = async {
        // Outside of the macro, which evaluates nothing where its level is off.
        let signal = signal.await;
        tracing::info!(signal, "leaving");
    };
    let mut stop = pin!(stop);
    let options = EndpointOptions { link_mbit: config.link_mbit, ..EndpointOptions::default() };
    let endpoint = Endpoint::bind(config.listen, identity, options)?;
    let http = match &config.http {
        Some(http) => Some(Http::bind(http).await?),
        None => None,
    };
    let url = http.as_ref().map(|http| http.url().to_owned());
    let setup = Setup {
        addr: config.advertise.unwrap_or(endpoint.local_addr()),
        endpoint,
        oracles: config.oracles,
        options: shine_cn::collection::Options { simd: config.simd, staleness_bound: config.staleness_bound },
        limits: config.limits,
    };
    let node = tokio::select! {
        node = ComputeNode::start(setup, Instant::now() + JOIN_TIME) => node?,
        () = &mut stop => return Ok(()),
    };
    tracing::info!(simd = %config.simd, threads = config.threads, "ready");
    ReadyLine::new(Role::Cn, &name, node.addr()).with_http(url).print();
    node.run(http, stop).await?;
    Ok(())
}
