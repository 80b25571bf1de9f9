//! Where the oracle's state lives between its lives: a redb file, or nowhere.
//!
//! ```text
//! <state-dir>/oracle.redb    table "oracle":   "format" -> u32, little-endian
//!                                              "state"  -> State, rkyv
//! ```
//!
//! The state is small (a line per member, region and collection) and changes rarely, so that it is written whole;
//! redb makes each write atomic and durable.
//!
//! Invariant: what [`StateStore::load`] returns was stored by [`StateStore::save`] and holds [`State::check`].

use std::fmt;
use std::path::{Path, PathBuf};

use redb::{Database, DatabaseError, ReadableDatabase as _, TableDefinition};
use shine_common::wire;

use crate::state::State;

/// Name of the file in the state directory.
pub const FILE_NAME: &str = "oracle.redb";
const FORMAT: u32 = 1;
const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("oracle");

/// Why the state cannot be had or kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory cannot be made.
    #[error("state directory {dir}: {why}")]
    Dir {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        why: std::io::Error,
    },
    /// Another process has the file.
    #[error("{path} is in use by another process: one oracle per state directory")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read or written.
    #[error("{action} {path}: {why}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the store said.
        why: Box<redb::Error>,
    },
    /// The file holds something else.
    #[error("{path} does not hold an oracle's state: {why}; move it away to start an empty cluster")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// Keeps the oracle's state.
pub trait StateStore: Send + fmt::Debug + 'static {
    /// The state that was saved last, if any was.
    ///
    /// # Errors
    /// If it cannot be read or is not one.
    fn load(&self) -> Result<Option<State>, StoreError>;

    /// Keeps `state` in place of the last one: durable when this returns.
    ///
    /// # Errors
    /// If it cannot be written; the last one stays.
    fn save(&self, state: &State) -> Result<(), StoreError>;
}

/// Keeps nothing: an oracle without a state directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStore;

impl StateStore for NoStore {
    fn load(&self) -> Result<Option<State>, StoreError> {
        Ok(None)
    }

    fn save(&self, _state: &State) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Keeps the state in a file.
pub struct FileStore {
    database: Database,
    path: PathBuf,
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl FileStore {
    /// Opens the store of `dir`, or makes one.
    ///
    /// # Errors
    /// If the directory or file cannot be used, or another oracle has it.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        std::fs::create_dir_all(dir).map_err(|why| StoreError::Dir { dir: dir.into(), why })?;
        let path = dir.join(FILE_NAME);
        let database = Database::create(&path).map_err(|e| match e {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.clone() },
            other => StoreError::File { action: "opening", path: path.clone(), why: Box::new(other.into()) },
        })?;
        Ok(Self { database, path })
    }

    fn failed(&self, action: &'static str) -> impl Fn(redb::Error) -> StoreError {
        let path = self.path.clone();
        move |why| StoreError::File { action, path: path.clone(), why: Box::new(why) }
    }
}

impl StateStore for FileStore {
    fn load(&self) -> Result<Option<State>, StoreError> {
        let failed = self.failed("reading");
        let malformed = |why: String| StoreError::Malformed { path: self.path.clone(), why };
        let read = self.database.begin_read().map_err(|e| failed(e.into()))?;
        let table = match read.open_table(TABLE) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(other) => return Err(failed(other.into())),
        };
        let get = |key: &str| table.get(key).map_err(|e| failed(e.into()));
        let Some(format) = get("format")? else { return Err(malformed("it has no format number".into())) };
        if format.value() != FORMAT.to_le_bytes() {
            return Err(malformed(format!(
                "its format is {:?}, this program reads {FORMAT}",
                format.value()
            )));
        }
        let Some(bytes) = get("state")? else { return Err(malformed("it holds no state".into())) };
        let state = wire::decode::<State>(bytes.value()).map_err(|bad| malformed(bad.to_string()))?;
        state.check().map_err(malformed)?;
        Ok(Some(state))
    }

    fn save(&self, state: &State) -> Result<(), StoreError> {
        let failed = self.failed("writing");
        let write = self.database.begin_write().map_err(|e| failed(e.into()))?;
        {
            let mut table = write.open_table(TABLE).map_err(|e| failed(e.into()))?;
            let format = FORMAT.to_le_bytes();
            table.insert("format", format.as_slice()).map_err(|e| failed(e.into()))?;
            table.insert("state", wire::encode(state).as_slice()).map_err(|e| failed(e.into()))?;
        }
        write.commit().map_err(|e| failed(e.into()))
    }
}

#[cfg(test)]
mod tests {
    use shine_common::ids::{Epoch, Incarnation};
    use shine_common::wire::{OracleRequest, Role};

    use super::*;
    use crate::state::Core;

    fn some_state() -> State {
        let mut core = Core::new(State::empty(Epoch(41)), 3_000, 0);
        let join = OracleRequest::Join {
            name: "mn-0".into(),
            role: Role::Mn,
            addr: "127.0.0.1:7".into(),
            incarnation: Incarnation(9),
            regions: 3,
            region_bytes: 64 << 20,
        };
        core.apply(&join, 0).unwrap();
        core.state().clone()
    }

    #[test]
    fn what_was_saved_last_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let state = some_state();
        {
            let store = FileStore::open(&dir.path().join("made/anew")).unwrap();
            assert_eq!(store.load().unwrap(), None);
            store.save(&State::empty(Epoch(7))).unwrap();
            store.save(&state).unwrap();
        }
        let store = FileStore::open(&dir.path().join("made/anew")).unwrap();
        assert_eq!(store.load().unwrap(), Some(state));
    }

    #[test]
    fn one_oracle_per_directory() {
        let dir = tempfile::tempdir().unwrap();
        let _first = FileStore::open(dir.path()).unwrap();
        let second = FileStore::open(dir.path()).unwrap_err();
        assert!(matches!(second, StoreError::InUse { .. }), "{second}");
        assert!(second.to_string().contains(FILE_NAME), "{second}");
    }

    #[test]
    fn a_file_of_something_else_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE_NAME), vec![0x5a; 10_000]).unwrap();
        let error = FileStore::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(FILE_NAME), "{error}");

        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        store.save(&some_state()).unwrap();
        let mut bytes = wire::encode(&some_state()).to_vec();
        let check = |key: &str, value: &[u8], named: &str| {
            let write = store.database.begin_write().unwrap();
            write.open_table(TABLE).unwrap().insert(key, value).unwrap();
            write.commit().unwrap();
            let error = store.load().unwrap_err().to_string();
            assert!(error.contains(named) && error.contains(FILE_NAME), "{error}");
        };
        bytes.truncate(bytes.len() - 1);
        check("state", &bytes, "not a valid");
        check("state", &[], "not a valid");
        check("format", &2u32.to_le_bytes(), "format");
    }
}
