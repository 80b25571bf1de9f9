//! Data that lanes run on, by name and sha256.

use std::path::PathBuf;

use anyhow::Context;
use shine_common::dataset::{default_root, find_file};

/// A file of a data set.
#[derive(Debug, Clone, Copy)]
pub(super) struct SetFile {
    name: &'static str,
    sha256: &'static str,
}

/// 331,479 words as 100 x i8.
pub(super) const GLOVE_BASE: SetFile = SetFile {
    name: "glove100/base.i8bin",
    sha256: "5d19bf61af3e0a4005086363b986131a48b22c96985b90d94e4ad486dd61227a",
};
/// 10,000 words, the first 5,000 of which have truth.
pub(super) const GLOVE_QUERIES: SetFile = SetFile {
    name: "glove100/query.i8bin",
    sha256: "33f7a7970c8939e442e02185ca6a45c6ad2df3eb9a9cb920b87813a2026cb100",
};
/// Exact neighbours among the first 100,000 rows.
pub(super) const GLOVE_TRUTH_100K: SetFile = SetFile {
    name: "glove100/gt_100k.ibin",
    sha256: "70486b24ad84fa2a0fbf8537f76dc775804775e0675e7e2cc2537935a2929f34",
};
/// 27,798 descriptions of Debian packages as 256 x i8.
pub(super) const DEBTEXT_BASE: SetFile = SetFile {
    name: "debtext/base.i8bin",
    sha256: "b2d56e7dc596bad4343c3d0f47da1d9c69d7cd69184c2f17b86892f16815e5b0",
};
/// 2,000 synopses of other packages.
pub(super) const DEBTEXT_QUERIES: SetFile = SetFile {
    name: "debtext/query.i8bin",
    sha256: "a7210efa8a6f15c3980659b9fd24291e3b25c2afb1c7d71dd13efc0051f9db7b",
};
/// Exact neighbours by inner product.
pub(super) const DEBTEXT_TRUTH: SetFile = SetFile {
    name: "debtext/gt_ip.ibin",
    sha256: "d7391f265685dfb4e480e1dc443b6341bd20897ef9da7ad234bff5ef5d41eadb",
};

impl SetFile {
    /// Where it is.
    ///
    /// # Errors
    /// If it is not there: says how to get it.
    pub(super) fn find(self) -> anyhow::Result<PathBuf> {
        let set = self.name.split('/').next().expect("a name has a folder");
        find_file(&default_root(), self.name, self.sha256).with_context(|| {
            let remake = if set == "glove100" { "make it with `scripts/data.sh`, or " } else { "" };
            format!("the set {set} is needed: {remake}set SHINE_DATA to the folder that holds {}", self.name)
        })
    }
}
