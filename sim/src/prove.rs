//! `shine-sim prove`: long checks of what the project claims, lane by lane. Each lane is a list of steps whose results
//! are kept, so that one that was interrupted goes on where it stopped; whole-cluster tests run the same code on
//! less data.

pub mod faults;
pub mod hostile;
pub mod inserts;
mod lanes;
mod ledger;
pub mod same_ids;
mod sets;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Options of `prove`.
#[derive(Debug, Clone, Args)]
pub struct ProveArgs {
    /// Lane to run
    #[arg(value_enum)]
    pub lane: Lane,
    /// Folder of results
    #[arg(long, value_name = "DIR", default_value = "out/prove")]
    pub out: PathBuf,
    /// Do every step anew
    #[arg(long)]
    pub anew: bool,
}

/// A long check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lane {
    /// Recall over QUIC against the library hnsw_rs by itself: glove100, 100,000 rows
    Recall,
    /// The same ids from every backend and compute node: i8 and f32
    Ids,
    /// Inner product and cosine: debtext, as i8 and as f32
    Ip,
    /// A million vectors: they load and answer, and take the memory that arithmetic says
    Big,
    /// Processes killed and paused during a stream of queries
    Faults,
    /// 10,000 hostile connections at every port while queries go on
    Hostile,
    /// 20,000 rows inserted by 8 clients into 50,000; a compute node killed while it inserts
    Insert,
}

impl Lane {
    fn name(self) -> &'static str {
        match self {
            Self::Recall => "recall",
            Self::Ids => "ids",
            Self::Ip => "ip",
            Self::Big => "big",
            Self::Faults => "faults",
            Self::Hostile => "hostile",
            Self::Insert => "insert",
        }
    }
}

/// Runs a lane, prints what it found and whether the claim holds.
///
/// # Errors
/// Also if the claim does not hold.
pub async fn run(args: ProveArgs) -> anyhow::Result<()> {
    let mut ledger = ledger::Ledger::open(&args.out, args.lane.name(), args.anew)?;
    let claims = match args.lane {
        Lane::Recall => lanes::recall(&mut ledger).await,
        Lane::Ids => lanes::ids(&mut ledger).await,
        Lane::Ip => lanes::ip(&mut ledger).await,
        Lane::Big => lanes::big(&mut ledger).await,
        Lane::Faults => lanes::faults(&mut ledger).await,
        Lane::Hostile => lanes::hostile(&mut ledger).await,
        Lane::Insert => lanes::insert(&mut ledger).await,
    }?;
    for claim in &claims {
        println!("{} {}", if claim.holds { "holds:" } else { "FAILS:" }, claim.text);
    }
    let failed = claims.iter().filter(|claim| !claim.holds).count();
    anyhow::ensure!(
        failed == 0,
        "{failed} of {} claims do not hold; figures: {}",
        claims.len(),
        ledger.path().display()
    );
    println!("figures: {}", ledger.path().display());
    Ok(())
}

/// Something that was to be shown, with the figures that show it.
#[derive(Debug, Clone)]
struct Claim {
    holds: bool,
    text: String,
}

impl Claim {
    fn new(holds: bool, text: String) -> Self {
        Self { holds, text }
    }
}
