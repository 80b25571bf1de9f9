//! Identifiers used everywhere in shine. All are small `Copy` newtypes; raw integers stay in [`crate::layout`]
//! and [`crate::wire`].

use std::fmt;
use std::str::FromStr;

use rkyv::{Archive, Deserialize, Serialize};

/// Number of a region: a logical stretch of remote memory. The cluster map says which memory node hosts it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(transparent)]
pub struct RegionId(pub u16);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}
impl fmt::Debug for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Address in disaggregated memory: 16-bit region, 48-bit byte offset. Zero is null: nothing lives at offset 0
/// of region 0, since every region opens with its superblock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct RemotePtr(u64);

const _: () = assert!(size_of::<RemotePtr>() == 8);

impl RemotePtr {
    /// The null pointer.
    pub const NULL: Self = Self(0);
    /// Largest offset that a pointer can carry.
    pub const OFFSET_MAX: u64 = (1 << 48) - 1;

    /// Pointer to byte `offset` of `region`.
    ///
    /// # Panics
    /// If `offset` needs more than 48 bits; region sizes are bounded by [`Self::OFFSET_MAX`] at start-up.
    #[inline]
    pub const fn new(region: RegionId, offset: u64) -> Self {
        assert!(offset <= Self::OFFSET_MAX, "an offset is at most 48 bits");
        Self(((region.0 as u64) << 48) | offset)
    }

    /// The region that the pointer names.
    #[inline]
    pub const fn region(self) -> RegionId {
        RegionId((self.0 >> 48) as u16)
    }

    /// Byte offset inside the region.
    #[inline]
    pub const fn offset(self) -> u64 {
        self.0 & Self::OFFSET_MAX
    }

    /// Pointer `bytes` further on in the same region.
    #[inline]
    pub const fn add(self, bytes: u64) -> Self {
        Self::new(self.region(), self.offset() + bytes)
    }

    /// Whether this is [`Self::NULL`].
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The word stored in remote memory for this pointer.
    #[inline]
    pub const fn to_word(self) -> u64 {
        self.0
    }

    /// The pointer stored as `word` in remote memory.
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }
}

impl fmt::Display for RemotePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_null() { f.write_str("null") } else { write!(f, "{}+{:#x}", self.region(), self.offset()) }
    }
}
impl fmt::Debug for RemotePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a node within its collection: chunk × slots-per-chunk + slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(transparent)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}", self.0)
    }
}
impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a collection, never reused within a cluster's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(transparent)]
pub struct CollectionId(pub u32);

impl fmt::Display for CollectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c{}", self.0)
    }
}
impl fmt::Debug for CollectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Version of a map, or of a region's place and content. Larger is newer; zero means *none yet*.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
)]
#[repr(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch after this one.
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}
impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One life of a process: drawn at random when it starts, so that a restarted memory node is never taken for
/// the one whose memory is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a compute node's access session on one memory node, never reused within the memory node's
/// incarnation; zero means *none*. A lock word names the session of its holder, so that the memory node can say
/// whether the holder may still write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(transparent)]
pub struct SessionId(pub u32);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}
impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A user's id of a vector: an unsigned 64-bit number or a UUID. The two never compare equal, also where their
/// bits agree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
pub enum ExternalId {
    /// A number, 0 to 2^64 − 1.
    Num(u64),
    /// A UUID, as its 128-bit value.
    Uuid(u128),
}

impl fmt::Display for ExternalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Num(n) => write!(f, "{n}"),
            Self::Uuid(u) => fmt::Display::fmt(&uuid::Uuid::from_u128(*u), f),
        }
    }
}
impl fmt::Debug for ExternalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is neither a decimal u64 nor a UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an id: expected a whole number from 0 to 18446744073709551615 or a UUID")]
pub struct BadExternalId(pub String);

impl FromStr for ExternalId {
    type Err = BadExternalId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(number) = text.parse::<u64>() {
            return Ok(Self::Num(number));
        }
        uuid::Uuid::try_parse(text)
            .map(|uuid| Self::Uuid(uuid.as_u128()))
            .map_err(|_| BadExternalId(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointer_keeps_region_and_offset() {
        for (region, offset) in [(0u16, 8u64), (1, 0), (u16::MAX, RemotePtr::OFFSET_MAX), (7, 4096)] {
            let ptr = RemotePtr::new(RegionId(region), offset);
            assert_eq!((ptr.region().0, ptr.offset()), (region, offset));
            assert_eq!(RemotePtr::from_word(ptr.to_word()), ptr);
        }
        assert!(RemotePtr::new(RegionId(0), 0).is_null());
    }

    #[test]
    fn external_ids_parse_and_print() {
        for text in ["0", "18446744073709551615", "67e55044-10b1-426f-9247-bb680e5fe0c8"] {
            assert_eq!(text.parse::<ExternalId>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "18446744073709551616", "67e55044-10b1-426f-9247", "1.5"] {
            assert!(text.parse::<ExternalId>().is_err(), "{text}");
        }
        assert_ne!(ExternalId::Num(5), ExternalId::Uuid(5));
    }
}
