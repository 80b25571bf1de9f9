//! What the configuration of all processes shares: values with units, a file under the flags, logs, the ready line,
//! and the signal to stop.
//!
//! A process has one plain struct of options that derives both `clap::Parser` (flags) and serde's traits (file), all
//! fields optional; [`merge`] lays the flags over the file, and the process's `validate` turns the result into its
//! checked form, naming all problems at once ([`Problems`]).

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::log_limit::Limited;
use crate::wire::Role;

/// Address that processes listen on unless told otherwise: loopback, any port.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:0";
/// Most oracles in a list.
pub const ORACLES_MAX: usize = 16;

// ------------------------------------------------------------------------------------------------- values

/// A number of bytes, written with a unit: `4096`, `64KiB`, `1.5GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// A text that is no number of bytes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{0}' is not a size: expected a number with an optional unit B, KiB, MiB, GiB or TiB, such as 64MiB"
)]
pub struct BadByteSize(pub String);

impl FromStr for ByteSize {
    type Err = BadByteSize;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadByteSize(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..digits], trimmed[digits..].trim_start());
        let factor = match unit {
            "" | "B" => 1,
            _ => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(bad)?.1,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        // At most nine digits of fraction, in exact integers: 1.5GiB is 1610612736 on every machine.
        let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) || fraction.len() > 9 {
            return Err(bad());
        }
        let whole: u64 = whole.parse().map_err(|_| bad())?;
        let scale = 10u128.pow(fraction.len() as u32);
        let fraction: u128 = fraction.parse().map_err(|_| bad())?;
        let bytes = u128::from(whole) * u128::from(factor) + fraction * u128::from(factor) / scale;
        u64::try_from(bytes).map(Self).map_err(|_| bad())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 != 0 && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size such as 64MiB, or a number of bytes")]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(bytes) => Ok(Self(bytes)),
            Form::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A text that is no list of addresses.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{given}' is not a list of addresses: {why}; expected host:port, separated by commas")]
pub struct BadAddresses {
    /// The text.
    pub given: String,
    /// What is wrong with it.
    pub why: String,
}

/// Socket addresses in a list such as `127.0.0.1:7001,oracle-2:7001`. Names are looked up, and each must have an
/// address; of several the first counts. Doubles are dropped.
///
/// # Errors
/// Names the entry that is wrong.
pub fn parse_addresses(list: &str) -> Result<Vec<SocketAddr>, BadAddresses> {
    let bad = |why: String| BadAddresses { given: list.to_owned(), why };
    let mut addrs: Vec<SocketAddr> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        if entry.is_empty() {
            return Err(bad("an entry is empty".into()));
        }
        let addr = match entry.parse() {
            Ok(addr) => addr,
            Err(_) => entry
                .to_socket_addrs()
                .map_err(|e| bad(format!("'{entry}': {e}")))?
                .next()
                .ok_or_else(|| bad(format!("'{entry}' has no address")))?,
        };
        if addr.port() == 0 {
            return Err(bad(format!("'{entry}' has no port")));
        }
        if !addrs.contains(&addr) {
            addrs.push(addr);
        }
    }
    if addrs.len() > ORACLES_MAX {
        return Err(bad(format!("{} entries, at most {ORACLES_MAX} are taken", addrs.len())));
    }
    Ok(addrs)
}

// --------------------------------------------------------------------------------------------------- files

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("reading {path}: {why}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// The file is not what was expected.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Line and column, and what was expected there.
        why: String,
    },
    /// A flag is not what was expected.
    #[error("{0}")]
    Flags(String),
    /// Values that make no sense.
    #[error(transparent)]
    Problems(#[from] Problems),
    /// The log filter is not one.
    #[error(
        "--log '{given}': {why}; expected a level (error, warn, info, debug, trace) or a filter such as info,quinn=warn"
    )]
    Log {
        /// The filter.
        given: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Options from a TOML `file`, with the `flags` that were given laid over them. Unset flags (`None`) do not count.
///
/// # Errors
/// Names the file, and the line of a value or key that is not expected.
pub fn merge<F, C>(file: Option<&Path>, flags: &F) -> Result<C, ConfigError>
where
    F: Serialize,
    C: DeserializeOwned,
{
    let mut merged = toml::Table::new();
    if let Some(path) = file {
        let text =
            std::fs::read_to_string(path).map_err(|why| ConfigError::Read { path: path.into(), why })?;
        let wrong = |e: toml::de::Error| ConfigError::File { path: path.into(), why: e.to_string() };
        // On its own first: errors then carry the line, and a bad value is found also where a flag covers it.
        toml::from_str::<C>(&text).map_err(wrong)?;
        merged = toml::from_str(&text).map_err(wrong)?;
    }
    let flags = toml::Table::try_from(flags).map_err(|e| ConfigError::Flags(e.to_string()))?;
    merged.extend(flags);
    merged.try_into().map_err(|e: toml::de::Error| ConfigError::Flags(e.to_string()))
}

/// All that is wrong with a configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct Problems(pub Vec<String>);

impl Problems {
    /// None so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes a problem unless `ok`.
    pub fn check(&mut self, ok: bool, problem: impl FnOnce() -> String) {
        if !ok {
            self.0.push(problem());
        }
    }

    /// The value, or a note of why there is none.
    pub fn take<T, E: fmt::Display>(&mut self, option: &str, result: Result<T, E>) -> Option<T> {
        result.map_err(|e| self.0.push(format!("--{option}: {e}"))).ok()
    }

    /// The value, or a note that the option is needed.
    pub fn need<T>(&mut self, option: &str, value: Option<T>) -> Option<T> {
        if value.is_none() {
            self.0.push(format!("--{option} is needed (or '{option}' in the configuration file)"));
        }
        value
    }

    /// `Ok` if there was no problem.
    ///
    /// # Errors
    /// All problems that were noted.
    pub fn into_result(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

// ------------------------------------------------------------------------------------------------- process

/// Sends logs to stderr, filtered by `filter` (a level, or targets with levels), and bounded in their rate
/// ([`crate::log_limit`]). Call once.
///
/// # Errors
/// If the filter is not one. A second call is without effect.
pub fn init_logs(filter: &str) -> Result<(), ConfigError> {
    let bad = |why: String| ConfigError::Log { given: filter.to_owned(), why };
    let parsed = tracing_subscriber::EnvFilter::builder().parse(filter).map_err(|e| bad(e.to_string()))?;
    if filter.trim().is_empty() {
        return Err(bad("it is empty".into()));
    }
    let _ = tracing_subscriber::fmt()
        .with_env_filter(parsed)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .map_event_format(Limited::new)
        .try_init();
    Ok(())
}

/// The one line that a process prints on stdout, once it is ready to be called.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReadyLine {
    /// Always true.
    pub ready: bool,
    /// Role.
    pub role: Role,
    /// Name.
    pub name: String,
    /// Where it is called.
    pub addr: SocketAddr,
    /// Where its HTTP API is called, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<String>,
}

impl ReadyLine {
    /// The line of a process.
    pub fn new(role: Role, name: impl Into<String>, addr: SocketAddr) -> Self {
        Self { ready: true, role, name: name.into(), addr, http: None }
    }

    /// The same with an HTTP API at `url`.
    pub fn with_http(self, url: Option<String>) -> Self {
        Self { http: url, ..self }
    }

    /// Prints it. Whoever started the process may be gone: that is not an error.
    pub fn print(&self) {
        let line = serde_json::to_string(self).expect("plain fields are always JSON");
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

/// Catches SIGTERM and SIGINT (Ctrl-C) from now on; the future is ready, with its name, when one has come. Made
/// before the ready line is printed, since whoever waits for that line may signal at once.
///
/// # Errors
/// If the system refuses a handler. Needs a tokio runtime.
pub fn stop_signal() -> io::Result<impl Future<Output = &'static str> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => "SIGTERM",
            _ = int.recv() => "SIGINT",
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("64MiB", 64 << 20),
            ("64 mib", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5KiB", 512),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in [
            "",
            "MiB",
            "-1",
            "1e3",
            "64MB",
            "1..5GiB",
            ".5GiB",
            "5.GiB",
            "18446744073709551616",
            "99999999TiB",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn sizes_print_as_they_are_read(bytes in any::<u64>(), shift in 0u32..50) {
            let size = ByteSize(bytes >> shift << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn any_text_is_a_size_or_an_error(text in ".{0,20}") {
            let _ = text.parse::<ByteSize>();
        }
    }

    #[test]
    fn address_lists_are_read_and_bad_entries_named() {
        let expected: Vec<SocketAddr> = vec![([127, 0, 0, 1], 7001).into(), "[::1]:7002".parse().unwrap()];
        assert_eq!(parse_addresses("127.0.0.1:7001, [::1]:7002,127.0.0.1:7001"), Ok(expected));
        for (list, named) in [
            ("", "empty"),
            ("127.0.0.1:1,,127.0.0.1:2", "empty"),
            ("127.0.0.1", "'127.0.0.1'"),
            ("127.0.0.1:0", "no port"),
            ("127.0.0.1:70000", "70000"),
        ] {
            let error = parse_addresses(list).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("host:port"), "{error}");
        }
        let many: Vec<String> = (1..=ORACLES_MAX + 1).map(|port| format!("127.0.0.1:{port}")).collect();
        assert!(parse_addresses(&many.join(",")).is_err());
    }

    #[derive(Default, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    struct Options {
        name: Option<String>,
        region_bytes: Option<ByteSize>,
        threads: Option<usize>,
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = file("name = 'from-file'\nregion-bytes = '64MiB'\n");
        let flags = Options { name: Some("from-flag".into()), threads: Some(2), ..Default::default() };
        let merged: Options = merge(Some(file.path()), &flags).unwrap();
        assert_eq!(
            merged,
            Options {
                name: Some("from-flag".into()),
                region_bytes: Some(ByteSize(64 << 20)),
                threads: Some(2)
            }
        );
        assert_eq!(merge::<_, Options>(None, &flags).unwrap(), flags);
    }

    #[test]
    fn a_bad_file_is_named_with_what_is_wrong_and_where() {
        let flags = Options { threads: Some(1), ..Default::default() };
        for (text, named) in [
            ("nam = 'x'", "unknown field `nam`"),
            ("\nregion-bytes = '64MB'", "64MB"),
            ("threads = 'two'", "threads"),
            ("name = ", "line 1"),
        ] {
            let file = file(text);
            let error = merge::<_, Options>(Some(file.path()), &flags).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
            assert!(error.contains(file.path().to_str().unwrap()), "{error}");
        }
        let missing =
            merge::<_, Options>(Some(Path::new("/nowhere/x.toml")), &flags).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/x.toml"), "{missing}");
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let mut problems = Problems::new();
        problems.check(false, || "first".into());
        problems.check(true, || unreachable!());
        assert_eq!(problems.need::<u32>("oracles", None), None);
        assert_eq!(problems.take("region-bytes", "64MB".parse::<ByteSize>()), None);
        let text = problems.into_result().unwrap_err().to_string();
        for part in ["first", "--oracles is needed", "--region-bytes: '64MB'"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(Problems::new().into_result(), Ok(()));
    }

    #[test]
    fn the_ready_line_is_as_documented() {
        let line = ReadyLine::new(Role::Cn, "cn-0", "127.0.0.1:40123".parse().unwrap());
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"ready":true,"role":"cn","name":"cn-0","addr":"127.0.0.1:40123"}"#);
        assert_eq!(serde_json::from_str::<ReadyLine>(&text).unwrap(), line);
    }
}
