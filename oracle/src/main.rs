//! `shine-oracle`: see `shine-oracle --help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use shine_common::config::{ReadyLine, init_logs, stop_signal};
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::tls::Identity;
use shine_common::wire::Role;
use shine_oracle::config::{Config, Options};
use shine_oracle::serve::{Loaded, OracleOptions, run};
use shine_oracle::store::{FileStore, NoStore, StateStore};

fn main() -> ExitCode {
    match start(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shine-oracle: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: Options) -> anyhow::Result<()> {
    let config = options.load()?;
    init_logs(&config.log)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let identity = Identity::load(&config.cert_dir)?.expect_role(Role::Oracle)?;
    let name = identity.name().to_string();
    if let Some(given) = config.name
        && given != name
    {
        anyhow::bail!("--name {given}: the certificate in {} is for '{name}'", config.cert_dir.display());
    }
    let store: Box<dyn StateStore> = match &config.state_dir {
        Some(dir) => Box::new(FileStore::open(dir)?),
        None => Box::new(NoStore),
    };
    let loaded = Loaded::from_store(store)?;
    let signal = stop_signal()?;
    let endpoint = Endpoint::bind(config.listen, identity, EndpointOptions::default())?;
    ReadyLine::new(Role::Oracle, &name, endpoint.local_addr()).print();
    let stop = async {
        // Not inside the macro: what is not logged is not evaluated.
        let signal = signal.await;
        tracing::info!(signal, "leaving");
    };
    run(endpoint, loaded, OracleOptions { lease: config.lease }, stop).await;
    Ok(())
}
