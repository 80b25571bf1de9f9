//! Runs the binary `shine` and looks at what it says.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn shine(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shine"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SHINE_")) {
        command.env_remove(name);
    }
    command.current_dir(dir).args(args).output().expect("the program can be started")
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn run(dir: &Path, args: &[&str]) -> Ran {
    let output = shine(dir, args);
    Ran {
        code: output.status.code().expect("an exit code, no signal"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Runs with and without `--json`: the code must be the same, the message whole in both, and stdout empty.
#[track_caller]
pub(crate) fn refused(dir: &Path, args: &[&str], code: i32, name: &str, parts: &[&str]) {
    let plain = run(dir, args);
    assert_eq!(plain.code, code, "{plain:?}");
    assert_eq!(plain.stdout, "", "{plain:?}");
    let json = run(dir, &[args, &["--json"]].concat());
    assert_eq!(json.code, code, "{json:?}");
    assert_eq!(json.stdout, "", "{json:?}");
    let error: Value = serde_json::from_str(&json.stderr).unwrap_or_else(|e| panic!("{e}: {json:?}"));
    assert_eq!(error["error"]["code"], name, "{json:?}");
    let message = error["error"]["message"].as_str().expect("a message");
    for part in parts {
        assert!(plain.stderr.contains(part), "'{part}' in {plain:?}");
        assert!(message.contains(part), "'{part}' in {json:?}");
    }
}

#[track_caller]
pub(crate) fn json(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{ran:?}");
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
}
