//! Results of the steps of a lane, kept in one file as they come.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::{self, Host};

/// See the module.
#[derive(Debug)]
pub(super) struct Ledger {
    path: PathBuf,
    content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    lane: String,
    commit: String,
    host: Host,
    /// By name of the step.
    steps: BTreeMap<String, Value>,
}

impl Ledger {
    /// Opens the ledger of `lane` in `folder`. Results of another commit are of no use and are dropped, as all are
    /// with `anew`.
    pub(super) fn open(folder: &Path, lane: &str, anew: bool) -> anyhow::Result<Self> {
        Self::open_at(folder, lane, anew, &host::commit())
    }

    fn open_at(folder: &Path, lane: &str, anew: bool, commit: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join(format!("{lane}.json"));
        let kept =
            fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str::<Content>(&text).ok());
        let content = match kept {
            Some(content) if !anew && content.commit == commit => content,
            _ => Content {
                lane: lane.to_owned(),
                commit: commit.to_owned(),
                host: Host::look(),
                steps: BTreeMap::new(),
            },
        };
        Ok(Self { path, content })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The result of step `name`: the kept one, or that of `work`, which is then kept.
    pub(super) async fn step<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        if let Some(kept) = self.content.steps.get(name)
            && let Ok(result) = serde_json::from_value(kept.clone())
        {
            println!("{name}: done before");
            return Ok(result);
        }
        println!("{name} ..");
        let result = work.await.with_context(|| name.to_owned())?;
        self.content.steps.insert(name.to_owned(), serde_json::to_value(&result)?);
        self.write()?;
        Ok(result)
    }

    /// The whole file or the one before it, never a part.
    fn write(&self) -> anyhow::Result<()> {
        let new = self.path.with_extension("json.new");
        let text = serde_json::to_string_pretty(&self.content)? + "\n";
        fs::write(&new, text).with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, &self.path).with_context(|| format!("writing {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn step(ledger: &mut Ledger, name: &str, value: u32) -> u32 {
        ledger.step(name, async { Ok(value) }).await.unwrap()
    }

    #[tokio::test]
    async fn a_step_is_done_once_per_commit() {
        let folder = tempfile::tempdir().unwrap();
        let open = |anew, commit| Ledger::open_at(folder.path(), "lane", anew, commit).unwrap();
        let mut ledger = open(false, "a");
        assert_eq!(step(&mut ledger, "one", 1).await, 1);
        assert_eq!(step(&mut ledger, "one", 2).await, 1);
        let failed = ledger.step::<u32>("two", async { anyhow::bail!("no") }).await;
        assert!(failed.is_err());
        let mut ledger = open(false, "a");
        assert_eq!(step(&mut ledger, "one", 3).await, 1);
        assert_eq!(step(&mut ledger, "two", 3).await, 3);
        assert_eq!(step(&mut open(false, "b"), "one", 4).await, 4);
        assert_eq!(step(&mut open(true, "b"), "one", 5).await, 5);
    }
}
