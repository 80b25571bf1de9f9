//! A user's working folder: commands are run in it as a user would, and what they say is looked at.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{Folder, shipped};

/// What a command came to.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// How a command was refused, as scripts see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Exit code.
    pub exit: i32,
    /// The error's short name, of programs that have one.
    pub code: String,
    /// What it says.
    pub message: String,
}

/// A user's working folder. The cluster in it is stopped at the end, however the test ends.
#[derive(Debug)]
pub struct Desk {
    folder: Folder,
}

impl Desk {
    /// An empty desk.
    pub fn new() -> Self {
        Self { folder: Folder::new() }
    }

    /// A desk with a cluster, as `shine up` starts it.
    pub fn with_cluster() -> (Self, Value) {
        let desk = Self::new();
        let up = desk.json(&["up", "--memory-nodes", "2", "--regions", "4", "--region-bytes", "16MiB"]);
        (desk, up)
    }

    /// The folder.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Runs `shine` as a user would, in this folder.
    pub fn run(&self, args: &[&str]) -> Ran {
        self.program("shine", args)
    }

    /// Runs one of the programs that were built, in this folder, until it ends by itself.
    pub fn program(&self, program: &str, args: &[&str]) -> Ran {
        let test = std::env::current_exe().expect("a test knows itself");
        let programs = test.parent().and_then(Path::parent).expect("tests lie in deps");
        let mut command = Command::new(programs.join(program));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SHINE_")) {
            command.env_remove(name);
        }
        // Of what is tested here nothing depends on how busy the machine is.
        command.env("SHINE_DEADLINE_MS", "60000").env("SHINE_CONNECT_MS", "60000");
        let output = command.current_dir(self.folder.root()).args(args).output();
        let output = output.expect("the program is built: cargo build --workspace");
        Ran {
            code: output.status.code().expect("an exit code, no signal"),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }

    /// The text of a command that succeeds, and says nothing on stderr.
    #[track_caller]
    pub fn text(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{args:?}: {ran:?}");
        ran.stdout
    }

    /// The document of a command that succeeds.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let ran = self.run(&[args, &["--json"]].concat());
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{args:?}: {ran:?}");
        serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {ran:?}"))
    }

    /// How `shine --json` is refused; it says nothing on stdout.
    #[track_caller]
    pub fn refusal(&self, args: &[&str]) -> Refusal {
        let ran = self.run(&[args, &["--json"]].concat());
        assert_eq!(ran.stdout, "", "{args:?}: {ran:?}");
        assert_ne!(ran.code, 0, "{args:?}: {ran:?}");
        let error: Value = serde_json::from_str(&ran.stderr).unwrap_or_else(|why| panic!("{why}: {ran:?}"));
        let field = |name: &str| error["error"][name].as_str().expect("a text").to_owned();
        Refusal { exit: ran.code, code: field("code"), message: field("message") }
    }

    /// Runs with and without `--json`: the exit code is the same, the message whole in both, and stdout empty.
    #[track_caller]
    pub fn refused(&self, args: &[&str], code: i32, name: &str, parts: &[&str]) {
        let plain = self.run(args);
        assert_eq!((plain.code, plain.stdout.as_str()), (code, ""), "{args:?}: {plain:?}");
        let refusal = self.refusal(args);
        assert_eq!((refusal.exit, refusal.code.as_str()), (code, name), "{args:?}: {refusal:?}");
        for part in parts {
            assert!(
                plain.stderr.contains(part) && refusal.message.contains(part),
                "'{part}' in {plain:?}, {refusal:?}"
            );
        }
    }

    /// Writes the first shipped rows and queries, and a graph of the rows.
    pub fn graph(&self, rows: usize) {
        let shipped = |name| shipped(name).to_str().expect("UTF-8").to_owned();
        let (base, queries) = (shipped("base.i8bin"), shipped("query.i8bin"));
        self.json(&["data", "convert", "--rows", &rows.to_string(), &base, "base.i8bin"]);
        self.json(&["data", "convert", "--rows", "200", &queries, "query.i8bin"]);
        let build = ["build", "base.i8bin", "--metric", "l2", "--m", "12", "--ef-construction", "80"];
        let built = self.json(&[&build[..], &["--out", "words.graph"]].concat());
        assert_eq!(built["vectors"], rows);
    }

    /// Names and content of all files here, but for what a cluster keeps.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.folder.root().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                let name = path.strip_prefix(self.folder.root()).expect("below the desk");
                let name = name.to_str().expect("UTF-8").to_owned();
                match path.is_dir() {
                    true if name == ".shine" => {}
                    true => {
                        folders.push(path);
                        files.insert(name + "/", Vec::new());
                    }
                    false => {
                        files.insert(name, std::fs::read(&path).expect("a file"));
                    }
                }
            }
        }
        files
    }

    /// Name, state and number of vectors of every collection; asking shows that the cluster answers.
    pub fn collections(&self) -> Vec<(String, String, u64)> {
        let list = self.json(&["collection", "list"]);
        let of = |info: &Value| {
            let text = |name: &str| info[name].as_str().expect("a text").to_owned();
            (text("name"), text("state"), info["vectors"].as_u64().expect("a number"))
        };
        list.as_array().expect("a list").iter().map(of).collect()
    }
}

impl Default for Desk {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        if self.folder.path(".shine/cluster.json").exists() {
            let down = self.run(&["down"]);
            if !std::thread::panicking() {
                assert_eq!(down.code, 0, "{down:?}");
            }
        }
    }
}

/// The ids of an answer of `shine search --json`, which are numbers.
pub fn ids(answer: &Value) -> Vec<u64> {
    let hits = answer["hits"].as_array().expect("hits");
    hits.iter().map(|hit| hit["id"].as_u64().expect("a number")).collect()
}
