//! Who is who: the cluster CA, the certificates it issues, and the identity of a peer.
//!
//! Every link is mutual TLS 1.3 under one CA per cluster. A node's certificate carries, as DNS subject alternative
//! names:
//!
//! ```text
//! node.shine                      any process of a shine cluster: what TLS itself checks on the server's side
//! <name>.<role>.node.shine        who it is, exactly one: "cn-0.cn.node.shine"
//! <host>...                       hosts given at issue, for the operator's eye only
//! ```
//!
//! Role and name are read from the certificate that TLS has verified, and nothing else is believed: an address is not
//! an identity. Processes that are never called (clients, admins) get certificates that cannot act as a server.
//!
//! A directory for a node holds `ca.pem`, `node.pem` and `node.key`; the CA's own holds `ca.pem` and `ca.key`.
//! Keys are ECDSA P-256, in files of mode 0600.
//!
//! Invariant: an [`Identity`] is a certificate that its own CA vouches for, valid when it was loaded, with its key.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, RootCertStore};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::wire::Role;

/// Name that every node's certificate carries and that a caller asks TLS to check.
pub const SERVER_NAME: &str = "node.shine";
/// End of the name that says who a process is.
const IDENTITY_SUFFIX: &str = ".node.shine";
/// Longest name of a process, in characters (a DNS label).
pub const NAME_MAX: usize = 63;
/// Life of a CA made by [`ClusterCa::init`].
const CA_DAYS: u32 = 3650;
/// Largest certificate or key file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Certificates are valid from a little before their issue, for machines whose clocks are behind.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

const CA_CERT: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
const NODE_CERT: &str = "node.pem";
const NODE_KEY: &str = "node.key";

/// Who is at the other end of a connection, as its verified certificate says.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PeerIdentity {
    /// Role.
    pub role: Role,
    /// Name, unique per role in the cluster.
    pub name: Arc<str>,
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} '{}'", self.role, self.name)
    }
}

/// Why there is no identity, or none that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read or written.
    #[error("{action} {path}: {why}{hint}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
        /// What to do about it, with its punctuation; may be empty.
        hint: &'static str,
    },
    /// A file that must not be overwritten is there.
    #[error(
        "{path} exists already: a second CA would lock out every node of the first; choose an empty directory"
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file is not what it should be.
    #[error("{path}: expected {expected}: {why}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        why: String,
    },
    /// The certificate was issued by another CA.
    #[error("{certificate} was not issued by the CA of {ca}: issue it anew with `shine ca issue`")]
    OtherCa {
        /// The certificate.
        certificate: PathBuf,
        /// The CA's certificate.
        ca: PathBuf,
    },
    /// The certificate is not valid now.
    #[error(
        "{certificate} is valid from {from} to {to}: issue it anew with `shine ca issue`, or set the clock"
    )]
    NotValidNow {
        /// The certificate.
        certificate: PathBuf,
        /// Start, as text.
        from: String,
        /// End, as text.
        to: String,
    },
    /// The private key belongs to another certificate.
    #[error("{key} is not the key of {certificate}: both must come from one `shine ca issue`")]
    KeyMismatch {
        /// The key.
        key: PathBuf,
        /// The certificate.
        certificate: PathBuf,
    },
    /// The process is started under a certificate of another role.
    #[error("certificate in {dir} is for {found}: expected role {expected}")]
    WrongRole {
        /// Directory of the certificate.
        dir: PathBuf,
        /// Whom it is for.
        found: PeerIdentity,
        /// Role that was wanted.
        expected: Role,
    },
    /// A certificate does not say who its holder is.
    #[error("certificate carries no shine identity: {0}")]
    NoIdentity(String),
    /// A name that certificates cannot carry.
    #[error("{what} '{given}': expected {expected}")]
    BadName {
        /// Kind of name.
        what: &'static str,
        /// The name.
        given: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The TLS library refused.
    #[error("tls: {0}")]
    Tls(String),
}

/// Whether `name` can name a process: 1 to 63 of `a-z 0-9 -`, not starting or ending with `-`.
pub fn is_process_name(name: &str) -> bool {
    (1..=NAME_MAX).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// The provider of all cryptography; explicit, so that no process-wide default is needed.
pub fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

// ------------------------------------------------------------------------------------------------------ CA

/// A cluster's certificate authority.
pub struct ClusterCa {
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for ClusterCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterCa").finish_non_exhaustive()
    }
}

impl ClusterCa {
    /// Makes a CA and writes it to `dir` (made if needed): `ca.pem`, and `ca.key` with mode 0600.
    ///
    /// # Errors
    /// [`TlsError::Exists`] if `dir` holds a CA already; nothing is changed then.
    pub fn init(dir: impl AsRef<Path>) -> Result<Self, TlsError> {
        let dir = dir.as_ref();
        let (ca, key_pem) = Self::generate()?;
        make_dir(dir)?;
        for file in [CA_CERT, CA_KEY] {
            if dir.join(file).exists() {
                return Err(TlsError::Exists { path: dir.join(file) });
            }
        }
        // The key first and never over another: two calls at once cannot leave a certificate without its key.
        write_new(&dir.join(CA_KEY), key_pem.as_bytes(), 0o600)?;
        write_new(&dir.join(CA_CERT), ca.certificate_pem.as_bytes(), 0o644)?;
        Ok(ca)
    }

    /// A CA that lives in this process only.
    pub fn ephemeral() -> Result<Self, TlsError> {
        Self::generate().map(|(ca, _)| ca)
    }

    /// Loads the CA of `dir`.
    ///
    /// # Errors
    /// If a file is missing or malformed, or the key is another CA's.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, TlsError> {
        let dir = dir.as_ref();
        let hint = ": make a CA with `shine ca init`";
        let (cert_path, key_path) = (dir.join(CA_CERT), dir.join(CA_KEY));
        let certificate_pem = read_text(&cert_path, hint)?;
        let key_pem = read_text(&key_path, hint)?;
        let certificate = parse_certificate(&cert_path, &certificate_pem)?;
        let malformed =
            |path: &Path, expected, why: String| TlsError::Malformed { path: path.into(), expected, why };
        let key = KeyPair::from_pem(&key_pem)
            .map_err(|e| malformed(&key_path, "a private key in PEM", e.to_string()))?;
        let (_, parsed) = X509Certificate::from_der(&certificate)
            .map_err(|e| malformed(&cert_path, "an X.509 certificate", e.to_string()))?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(TlsError::KeyMismatch { key: key_path, certificate: cert_path });
        }
        let issuer = Issuer::from_ca_cert_der(&certificate, key)
            .map_err(|e| malformed(&cert_path, "a CA certificate", e.to_string()))?;
        Ok(Self { certificate, certificate_pem, issuer })
    }

    /// Issues a certificate and writes `ca.pem`, `node.pem` and `node.key` (mode 0600) to `out_dir`, over older
    /// ones of the same cluster.
    ///
    /// `hosts` are names or IP addresses that the operator wants to see in the certificate; they decide nothing.
    ///
    /// # Errors
    /// If a name cannot be carried, `out_dir` belongs to another cluster, or a file cannot be written.
    pub fn issue(
        &self,
        role: Role,
        name: &str,
        hosts: &[String],
        days: u32,
        out_dir: impl AsRef<Path>,
    ) -> Result<(), TlsError> {
        let now = wall_clock();
        self.issue_between(role, name, hosts, now - CLOCK_SKEW, now + days_long(days), out_dir)
    }

    /// As [`Self::issue`], valid from `from` until `to`.
    pub fn issue_between(
        &self,
        role: Role,
        name: &str,
        hosts: &[String],
        from: SystemTime,
        to: SystemTime,
        out_dir: impl AsRef<Path>,
    ) -> Result<(), TlsError> {
        let out_dir = out_dir.as_ref();
        let (certificate_pem, key) = self.sign(role, name, hosts, from, to)?;
        make_dir(out_dir)?;
        let ca_path = out_dir.join(CA_CERT);
        if ca_path.exists() && parse_certificate(&ca_path, &read_text(&ca_path, "")?)? != self.certificate {
            return Err(TlsError::Malformed {
                path: ca_path,
                expected: "this cluster's CA, or no file",
                why: "it is another CA's certificate".into(),
            });
        }
        replace(&ca_path, self.certificate_pem.as_bytes(), 0o644)?;
        replace(&out_dir.join(NODE_KEY), key.serialize_pem().as_bytes(), 0o600)?;
        replace(&out_dir.join(NODE_CERT), certificate_pem.as_bytes(), 0o644)
    }

    /// An identity that is never written to a file, valid for a day.
    pub fn identity(&self, role: Role, name: &str) -> Result<Identity, TlsError> {
        let now = wall_clock();
        self.identity_between(role, name, now - CLOCK_SKEW, now + days_long(1))
    }

    /// As [`Self::identity`], valid from `from` until `to`, and not checked against the clock: for tests of peers
    /// that must refuse it.
    pub fn identity_between(
        &self,
        role: Role,
        name: &str,
        from: SystemTime,
        to: SystemTime,
    ) -> Result<Identity, TlsError> {
        let (certificate_pem, key) = self.sign(role, name, &[], from, to)?;
        let chain = vec![parse_certificate(Path::new("(in memory)"), &certificate_pem)?];
        let peer = identity_of(&chain[0])?;
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|e| TlsError::Tls(e.to_owned()))?;
        Identity::assemble(self.certificate.clone(), chain, key, peer)
    }

    fn generate() -> Result<(Self, String), TlsError> {
        let now = wall_clock();
        let key = KeyPair::generate().map_err(rcgen_error)?;
        let key_pem = key.serialize_pem();
        let mut params = CertificateParams::default();
        // A subject of its own for every CA: a certificate of another cluster then names an unknown issuer, which is
        // what the peer reports, and not a broken signature.
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("shine cluster CA {:016x}", random_number()));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_1970(now - CLOCK_SKEW);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(now + days_long(CA_DAYS));
        let certificate = params.self_signed(&key).map_err(rcgen_error)?;
        let ca = Self {
            certificate: certificate.der().clone(),
            certificate_pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        };
        Ok((ca, key_pem))
    }

    fn sign(
        &self,
        role: Role,
        name: &str,
        hosts: &[String],
        from: SystemTime,
        to: SystemTime,
    ) -> Result<(String, KeyPair), TlsError> {
        if !is_process_name(name) {
            return Err(TlsError::BadName {
                what: "name",
                given: name.into(),
                expected: "1 to 63 of a-z 0-9 -, not starting or ending with -",
            });
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("shine {role} {name}"));
        params.subject_alt_names.push(dns_name(SERVER_NAME.to_owned())?);
        params.subject_alt_names.push(dns_name(format!("{name}.{role}{IDENTITY_SUFFIX}"))?);
        for host in hosts {
            params.subject_alt_names.push(host_name(host)?);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match role {
            Role::Cn | Role::Mn | Role::Oracle => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            Role::Client | Role::Admin => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_1970(from);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(to);
        let key = KeyPair::generate().map_err(rcgen_error)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(rcgen_error)?;
        Ok((certificate.pem(), key))
    }
}

// ------------------------------------------------------------------------------------------------ identity

/// What a process shows to its peers, and the CA by which it judges them.
#[derive(Clone)]
pub struct Identity {
    peer: PeerIdentity,
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    roots: Arc<RootCertStore>,
    dir: PathBuf,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("peer", &self.peer).field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Identity {
    /// Loads `ca.pem`, `node.pem` and `node.key` from `dir` and checks that they belong together and are valid now.
    ///
    /// # Errors
    /// Names the file and what was expected of it.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self, TlsError> {
        Self::load_as_of(dir, wall_clock())
    }

    /// As [`Self::load`], with the time given.
    pub fn load_as_of(dir: impl AsRef<Path>, now: SystemTime) -> Result<Self, TlsError> {
        let dir = dir.as_ref();
        let hint = ": make it with `shine ca issue`, or name the directory that holds it with --cert-dir";
        let (ca_path, cert_path, key_path) = (dir.join(CA_CERT), dir.join(NODE_CERT), dir.join(NODE_KEY));
        let ca = parse_certificate(&ca_path, &read_text(&ca_path, hint)?)?;
        let certificate = parse_certificate(&cert_path, &read_text(&cert_path, hint)?)?;
        let key = PrivateKeyDer::from_pem_slice(read_text(&key_path, hint)?.as_bytes()).map_err(|e| {
            TlsError::Malformed {
                path: key_path.clone(),
                expected: "a private key in PEM",
                why: e.to_string(),
            }
        })?;
        let peer = identity_of(&certificate).map_err(|e| TlsError::Malformed {
            path: cert_path.clone(),
            expected: "a certificate made by `shine ca issue`",
            why: e.to_string(),
        })?;
        let mut identity = Self::assemble(ca, vec![certificate], key, peer)?;
        identity.dir = dir.into();
        identity.check_own(now, &ca_path, &cert_path, &key_path)?;
        Ok(identity)
    }

    fn assemble(
        ca: CertificateDer<'static>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        peer: PeerIdentity,
    ) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        roots.add(ca).map_err(|e| TlsError::Tls(format!("the CA certificate cannot be used: {e}")))?;
        Ok(Self { peer, chain, key: Arc::new(key), roots: Arc::new(roots), dir: PathBuf::new() })
    }

    /// Who this process is.
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// Own role.
    pub fn role(&self) -> Role {
        self.peer.role
    }

    /// Own name.
    pub fn name(&self) -> &Arc<str> {
        &self.peer.name
    }

    /// Trusts the CA of `other` in place of its own: a forger's identity.
    #[cfg(test)]
    pub(crate) fn trust_instead(&mut self, other: &Self) {
        self.roots = other.roots.clone();
    }

    /// Refuses an identity of another role: for the start of a process.
    ///
    /// # Errors
    /// [`TlsError::WrongRole`].
    pub fn expect_role(self, expected: Role) -> Result<Self, TlsError> {
        if self.peer.role == expected {
            Ok(self)
        } else {
            Err(TlsError::WrongRole { dir: self.dir, found: self.peer, expected })
        }
    }

    /// TLS for the side that is called: asks for a client certificate of the same CA.
    pub fn server_config(&self, alpn: &[&[u8]]) -> Result<rustls::ServerConfig, TlsError> {
        let tls = |e: rustls::Error| TlsError::Tls(e.to_string());
        let verifier = self.client_verifier()?;
        let mut config = rustls::ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(tls)?;
        config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
        // No early data (it can be replayed), and no tickets: each connection shows its certificate.
        config.max_early_data_size = 0;
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// TLS for the side that calls.
    pub fn client_config(&self, alpn: &[&[u8]]) -> Result<rustls::ClientConfig, TlsError> {
        let tls = |e: rustls::Error| TlsError::Tls(e.to_string());
        let verifier = WebPkiServerVerifier::builder_with_provider(self.roots.clone(), crypto_provider())
            .build()
            .map_err(|e| TlsError::Tls(e.to_string()))?;
        let mut config = rustls::ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls)?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(tls)?;
        config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
        config.resumption = rustls::client::Resumption::disabled();
        Ok(config)
    }

    fn client_verifier(&self) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
        WebPkiClientVerifier::builder_with_provider(self.roots.clone(), crypto_provider())
            .build()
            .map_err(|e| TlsError::Tls(e.to_string()))
    }

    /// Our own certificate as a peer would judge it, so that a mistake shows at start and not in a peer's log.
    fn check_own(&self, now: SystemTime, ca: &Path, certificate: &Path, key: &Path) -> Result<(), TlsError> {
        let unix_now = UnixTime::since_unix_epoch(since_1970(now));
        match self.client_verifier()?.verify_client_cert(&self.chain[0], &[], unix_now) {
            Ok(_) => {}
            Err(rustls::Error::InvalidCertificate(why)) => {
                return Err(match why {
                    CertificateError::Expired
                    | CertificateError::ExpiredContext { .. }
                    | CertificateError::NotValidYet
                    | CertificateError::NotValidYetContext { .. } => {
                        let (from, to) = validity_of(&self.chain[0]);
                        TlsError::NotValidNow { certificate: certificate.into(), from, to }
                    }
                    CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                        TlsError::OtherCa { certificate: certificate.into(), ca: ca.into() }
                    }
                    other => TlsError::Malformed {
                        path: certificate.into(),
                        expected: "a certificate made by `shine ca issue`",
                        why: other.to_string(),
                    },
                });
            }
            Err(other) => return Err(TlsError::Tls(other.to_string())),
        }
        let signer = crypto_provider().key_provider.load_private_key(self.key.clone_key()).map_err(|e| {
            TlsError::Malformed { path: key.into(), expected: "an ECDSA P-256 key", why: e.to_string() }
        })?;
        match rustls::sign::CertifiedKey::new(self.chain.clone(), signer).keys_match() {
            Ok(()) => Ok(()),
            Err(_) => Err(TlsError::KeyMismatch { key: key.into(), certificate: certificate.into() }),
        }
    }
}

/// Who a certificate is for. Believe it only of a certificate that TLS has verified.
///
/// # Errors
/// [`TlsError::NoIdentity`] if it does not name exactly one process.
pub fn identity_of(certificate: &CertificateDer<'_>) -> Result<PeerIdentity, TlsError> {
    let no = |why: String| TlsError::NoIdentity(why);
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|e| no(e.to_string()))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|e| no(e.to_string()))?
        .ok_or_else(|| no("it has no subject alternative names".into()))?;
    let mut found = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => name.strip_suffix(IDENTITY_SUFFIX),
        _ => None,
    });
    let (who, more) = (found.next(), found.next());
    let who = match (who, more) {
        (Some(who), None) => who,
        (None, _) => return Err(no(format!("expected a name that ends in '{IDENTITY_SUFFIX}'"))),
        (Some(_), Some(_)) => return Err(no(format!("more than one name ends in '{IDENTITY_SUFFIX}'"))),
    };
    let (name, role) = who
        .rsplit_once('.')
        .ok_or_else(|| no(format!("'{who}{IDENTITY_SUFFIX}' is not <name>.<role>{IDENTITY_SUFFIX}")))?;
    let role = role.parse::<Role>().map_err(|e| no(e.to_string()))?;
    if !is_process_name(name) {
        return Err(no(format!("'{name}' is not a name of a process")));
    }
    Ok(PeerIdentity { role, name: name.into() })
}

fn validity_of(certificate: &CertificateDer<'_>) -> (String, String) {
    match X509Certificate::from_der(certificate) {
        Ok((_, parsed)) => {
            (parsed.validity().not_before.to_string(), parsed.validity().not_after.to_string())
        }
        Err(_) => ("?".into(), "?".into()),
    }
}

fn rcgen_error(error: rcgen::Error) -> TlsError {
    TlsError::Tls(error.to_string())
}

fn dns_name(name: String) -> Result<SanType, TlsError> {
    Ok(SanType::DnsName(name.try_into().map_err(rcgen_error)?))
}

fn host_name(host: &str) -> Result<SanType, TlsError> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(ip));
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    // Names under `.shine` are identities, and only `name` and `role` may set one.
    let lower = host.to_ascii_lowercase();
    if host.len() > 253 || !host.split('.').all(is_label) || lower == "shine" || lower.ends_with(".shine") {
        return Err(TlsError::BadName {
            what: "host",
            given: host.into(),
            expected: "an IP address or a DNS name that does not end in .shine",
        });
    }
    dns_name(host.to_owned())
}

/// Certificates live by the clock that operators read.
#[expect(
    clippy::disallowed_methods,
    reason = "validity is in calendar time, and judged so by every TLS library"
)]
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

#[expect(clippy::disallowed_methods, reason = "names of CAs and of part files must differ from all others")]
fn random_number() -> u64 {
    rand::random()
}

fn days_long(days: u32) -> Duration {
    Duration::from_secs(u64::from(days) * 24 * 3600)
}

fn since_1970(time: SystemTime) -> Duration {
    // Certificates count whole seconds.
    Duration::from_secs(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

fn make_dir(dir: &Path) -> Result<(), TlsError> {
    fs::create_dir_all(dir).map_err(|why| TlsError::File {
        action: "making",
        path: dir.into(),
        why,
        hint: "",
    })
}

fn read_text(path: &Path, hint: &'static str) -> Result<String, TlsError> {
    let file = |why| TlsError::File { action: "reading", path: path.into(), why, hint };
    let bytes = fs::metadata(path).map_err(file)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(TlsError::Malformed {
            path: path.into(),
            expected: "a PEM file of at most 1 MiB",
            why: format!("{bytes} bytes"),
        });
    }
    fs::read_to_string(path).map_err(file)
}

fn parse_certificate(path: &Path, pem: &str) -> Result<CertificateDer<'static>, TlsError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| TlsError::Malformed {
        path: path.into(),
        expected: "a certificate in PEM",
        why: e.to_string(),
    })
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<(), TlsError> {
    let file = |why: io::Error| match why.kind() {
        io::ErrorKind::AlreadyExists => TlsError::Exists { path: path.into() },
        _ => TlsError::File { action: "writing", path: path.into(), why, hint: "" },
    };
    let mut out = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(file)?;
    out.write_all(bytes).and_then(|()| out.sync_all()).map_err(file)
}

/// Writes a file whole or not at all, over an older one.
fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), TlsError> {
    let file = |why| TlsError::File { action: "writing", path: path.into(), why, hint: "" };
    let part = path.with_extension(format!("{:016x}.part", random_number()));
    write_new(&part, bytes, mode)?;
    fs::rename(&part, path).map_err(|why| {
        let _ = fs::remove_file(&part);
        file(why)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn issued(ca: &ClusterCa, role: Role, name: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        ca.issue(role, name, &["127.0.0.1".into(), "host-1.example".into()], 30, dir.path()).unwrap();
        dir
    }

    #[test]
    fn an_issued_identity_loads_with_its_role_and_name() {
        let ca_dir = tempfile::tempdir().unwrap();
        ClusterCa::init(ca_dir.path()).unwrap();
        let ca = ClusterCa::load(ca_dir.path()).unwrap();
        for (role, name) in [(Role::Cn, "cn-0"), (Role::Mn, "m"), (Role::Oracle, "o1"), (Role::Admin, "root")]
        {
            let dir = issued(&ca, role, name);
            let identity = Identity::load(dir.path()).unwrap();
            assert_eq!((identity.role(), &**identity.name()), (role, name));
            let mode = fs::metadata(dir.path().join(NODE_KEY)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let mode = fs::metadata(ca_dir.path().join(CA_KEY)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_ca_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        ClusterCa::init(dir.path()).unwrap();
        let before = fs::read(dir.path().join(CA_KEY)).unwrap();
        assert!(matches!(ClusterCa::init(dir.path()), Err(TlsError::Exists { .. })));
        assert_eq!(fs::read(dir.path().join(CA_KEY)).unwrap(), before);
    }

    #[test]
    fn issuing_again_replaces_and_refuses_another_clusters_directory() {
        let (ours, theirs) = (ClusterCa::ephemeral().unwrap(), ClusterCa::ephemeral().unwrap());
        let dir = issued(&ours, Role::Cn, "a");
        ours.issue(Role::Mn, "b", &[], 1, dir.path()).unwrap();
        assert_eq!(Identity::load(dir.path()).unwrap().role(), Role::Mn);
        let error = theirs.issue(Role::Mn, "b", &[], 1, dir.path()).unwrap_err().to_string();
        assert!(error.contains("ca.pem") && error.contains("another CA"), "{error}");
    }

    #[test]
    fn bad_files_are_named_with_what_was_expected() {
        let (ca, other) = (ClusterCa::ephemeral().unwrap(), ClusterCa::ephemeral().unwrap());
        let check = |damage: &dyn Fn(&Path), expected: &[&str]| {
            let dir = issued(&ca, Role::Cn, "cn-0");
            damage(dir.path());
            let error = Identity::load(dir.path()).unwrap_err().to_string();
            for part in expected {
                assert!(error.contains(part), "'{error}' does not say '{part}'");
            }
        };
        let foreign = issued(&other, Role::Cn, "cn-0");
        for file in [CA_CERT, NODE_CERT, NODE_KEY] {
            check(&|dir| fs::remove_file(dir.join(file)).unwrap(), &[file, "shine ca issue"]);
            check(&|dir| fs::write(dir.join(file), "nonsense").unwrap(), &[file, "PEM"]);
            check(&|dir| fs::write(dir.join(file), vec![b'x'; 2 << 20]).unwrap(), &[file, "1 MiB"]);
        }
        let copy = |file: &'static str, dir: &Path| {
            fs::copy(foreign.path().join(file), dir.join(file)).unwrap();
        };
        check(&|dir| copy(CA_CERT, dir), &["node.pem", "not issued by", "ca.pem"]);
        check(&|dir| copy(NODE_KEY, dir), &["node.key", "not the key of", "node.pem"]);
    }

    #[test]
    fn validity_is_judged_by_the_clock_given() {
        let ca = ClusterCa::ephemeral().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let now = wall_clock();
        let hour = Duration::from_secs(3600);
        ca.issue_between(Role::Cn, "c", &[], now - 3 * hour, now - 2 * hour, dir.path()).unwrap();
        let error = Identity::load(dir.path()).unwrap_err();
        assert!(matches!(error, TlsError::NotValidNow { .. }), "{error}");
        assert!(error.to_string().contains("node.pem"), "{error}");
        let early = Identity::load_as_of(dir.path(), now - 4 * hour).unwrap_err();
        assert!(matches!(early, TlsError::NotValidNow { .. }), "{early}");
    }

    #[test]
    fn a_process_refuses_to_start_under_another_role() {
        let dir = issued(&ClusterCa::ephemeral().unwrap(), Role::Client, "u");
        let error = Identity::load(dir.path()).unwrap().expect_role(Role::Mn).unwrap_err().to_string();
        assert!(error.contains("client 'u'") && error.contains("expected role mn"), "{error}");
    }

    #[test]
    fn names_that_could_pass_for_an_identity_are_refused() {
        let ca = ClusterCa::ephemeral().unwrap();
        let dir = tempfile::tempdir().unwrap();
        for name in ["", "-a", "a-", "A", "a.b", "a_b", "x.cn", &"a".repeat(64)] {
            assert!(matches!(ca.identity(Role::Cn, name), Err(TlsError::BadName { .. })), "{name}");
        }
        for host in ["", "a..b", "evil.mn.node.shine", "NODE.SHINE", "shine", "a b", "*.example"] {
            let refused = ca.issue(Role::Cn, "c", &[host.into()], 1, dir.path());
            assert!(matches!(refused, Err(TlsError::BadName { .. })), "{host}");
        }
    }

    #[test]
    fn a_certificate_without_identity_is_refused() {
        let key = KeyPair::generate().unwrap();
        for names in
            [vec![], vec!["x.example"], vec!["a.cn.node.shine", "b.mn.node.shine"], vec!["a.king.node.shine"]]
        {
            let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
            let certificate = CertificateParams::new(names.clone()).unwrap().self_signed(&key).unwrap();
            assert!(matches!(identity_of(certificate.der()), Err(TlsError::NoIdentity(_))), "{names:?}");
        }
    }
}
