//! The memory of one region: an anonymous mapping that is only ever touched as aligned 8-byte words.
//!
//! ```text
//!   base ┌────────┬────────┬─ ─ ─┬────────┐ base + bytes          word i = little-endian u64 at 8·i
//!        │ word 0 │ word 1 │     │ word n │ (then padding up to the page size, never reachable)
//!        └────────┴────────┴─ ─ ─┴────────┘
//! ```
//!
//! Invariant: no `&[u8]` over bytes that may change ever exists. Every access is an atomic load or store of a whole
//! word, so concurrent access is defined, words are never torn, and everything longer may be. The one exception is
//! [`RegionMemory::lend`], whose caller answers for the bytes being final.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;

/// Which pages to ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Ordinary pages.
    Off,
    /// Transparent huge pages, where the kernel grants them.
    #[default]
    Transparent,
    /// Pages of the host's reserved pool (`vm.nr_hugepages`); transparent ones where the pool is too small.
    Reserved,
}

/// Which pages a region got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// Ordinary pages.
    Small,
    /// The kernel was asked for transparent huge pages and agreed to try.
    Transparent,
    /// From the reserved pool.
    Reserved,
}

impl std::fmt::Display for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Small => "small pages",
            Self::Transparent => "transparent huge pages",
            Self::Reserved => "reserved huge pages",
        })
    }
}

const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4 << 10;
const LINE_BYTES: usize = 64;

/// Zeroed memory of one region.
pub struct RegionMemory {
    base: NonNull<u8>,
    bytes: usize,
    mapped_bytes: usize,
    pages: Pages,
}

// SAFETY: the mapping is owned by this value until it is dropped, and is touched only through atomic words.
unsafe impl Send for RegionMemory {}
// SAFETY: as above; shared access is atomic.
unsafe impl Sync for RegionMemory {}

impl std::fmt::Debug for RegionMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegionMemory")
            .field("bytes", &self.bytes)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl RegionMemory {
    /// Maps `bytes` (a multiple of 8, at least 8) of zeroed memory. Pages are touched when they are first written.
    ///
    /// # Errors
    /// If the size is not allowed, or the kernel has no such stretch of address space or memory.
    pub fn new(bytes: u64, huge: HugePages) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        if bytes == 0 || !bytes.is_multiple_of(8) || bytes as u64 > crate::ids::RemotePtr::OFFSET_MAX {
            let what = format!("a region of {bytes} bytes: expected a multiple of 8 from 8 to 2^48 - 8");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if huge == HugePages::Reserved {
            let mapped_bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
            // The pool is reserved at mmap time (no MAP_NORESERVE), so that a later touch cannot fault for want of it.
            if let Ok(base) = map(mapped_bytes, libc::MAP_HUGETLB) {
                return Ok(Self { base, bytes, mapped_bytes, pages: Pages::Reserved });
            }
        }
        let mapped_bytes = bytes.next_multiple_of(PAGE_BYTES);
        let base = map(mapped_bytes, libc::MAP_NORESERVE)?;
        let mut memory = Self { base, bytes, mapped_bytes, pages: Pages::Small };
        if huge != HugePages::Off && memory.advise(libc::MADV_HUGEPAGE).is_ok() {
            memory.pages = Pages::Transparent;
        }
        Ok(memory)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Which pages it got.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Whether `len` bytes at `offset` lie inside.
    #[inline]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.bytes as u64)
    }

    /// The word at `offset`.
    ///
    /// # Panics
    /// If `offset` is not a multiple of 8 or the word is not inside; so do all methods below.
    #[inline]
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        &self.words(offset, 8)[0]
    }

    /// Appends the `len` bytes at `offset` (a multiple of 8; `len` need not be one) to `out`, word by word.
    #[inline]
    pub fn append_to(&self, offset: u64, len: usize, out: &mut BytesMut) {
        let words = self.words(offset, len.next_multiple_of(8));
        out.reserve(len);
        copy_words_out(words, &mut out.spare_capacity_mut()[..len]);
        // SAFETY: `copy_words_out` initialises every byte of the slice it is given, which is the next `len` bytes.
        unsafe { out.set_len(out.len() + len) };
    }

    /// Copies `out.len()` words from `offset` on, word by word, each as its little-endian bytes.
    #[inline]
    pub fn copy_words(&self, offset: u64, out: &mut [[u8; 8]]) {
        let words = self.words(offset, 8 * out.len());
        for (bytes, word) in out.iter_mut().zip(words) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
    }

    /// The `len` bytes at `offset` where they lie.
    ///
    /// # Safety
    /// Nobody writes to these bytes as long as the slice is used, also not by a verb. Who reads them was told of them
    /// through a word that was stored after they were.
    ///
    /// # Panics
    /// If they are not inside.
    #[inline]
    pub unsafe fn lend(&self, offset: u64, len: usize) -> &[u8] {
        assert!(self.contains(offset, len as u64), "lent bytes lie inside the region");
        // SAFETY: the range lies inside the mapping, which lives as long as `self` and is readable; that nobody writes
        // there is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize), len) }
    }

    /// Stores `data` (its length a multiple of 8) at `offset`, word by word, in address order.
    #[inline]
    pub fn write(&self, offset: u64, data: &[u8]) {
        assert!(data.len().is_multiple_of(8), "writes are of whole words");
        if data.is_empty() {
            return;
        }
        let (chunks, _) = data.as_chunks::<8>();
        for (word, bytes) in self.words(offset, data.len()).iter().zip(chunks) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Asks the processor to fetch the lines of `len` bytes at `offset`; nothing happens outside the region.
    #[inline]
    pub fn prefetch(&self, offset: u64, len: usize) {
        if !self.contains(offset, len as u64) {
            return;
        }
        let mut line = offset as usize & !(LINE_BYTES - 1);
        while line < offset as usize + len {
            // SAFETY: `line` is inside the mapping; a prefetch reads nothing architecturally.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().add(line).cast());
            }
            line += LINE_BYTES;
        }
    }

    /// Makes every word zero and gives the pages back to the kernel where it takes them.
    pub fn zero(&self) {
        if self.advise(libc::MADV_DONTNEED).is_err() {
            // Locked pages, or huge ones before Linux 5.18.
            for word in self.words(0, self.bytes) {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn words(&self, offset: u64, len: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && self.contains(offset, len as u64), "words lie inside the region");
        // SAFETY: the range lies inside the mapping, which lives as long as `self`, is page-aligned at its base and
        // readable and writable; `offset` is a multiple of 8; and all access in this process is atomic.
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize).cast::<AtomicU64>(), len / 8)
        }
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is exactly the mapping that this value owns; after MADV_DONTNEED its pages read as zeros.
        let done = unsafe { libc::madvise(self.base.as_ptr().cast(), self.mapped_bytes, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for RegionMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and no borrow of it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

fn map(bytes: usize, extra_flags: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice aliases nothing.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(base.cast()).expect("mmap of no fixed address never returns null"))
}

/// Copies words into bytes. The last word may be used in part.
#[inline]
fn copy_words_out(words: &[AtomicU64], out: &mut [MaybeUninit<u8>]) {
    let (whole, rest) = out.as_chunks_mut::<8>();
    for (bytes, word) in whole.iter_mut().zip(words) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes().map(MaybeUninit::new);
    }
    if !rest.is_empty() {
        let last = words[whole.len()].load(Ordering::Relaxed).to_le_bytes();
        for (byte, value) in rest.iter_mut().zip(last) {
            byte.write(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(memory: &RegionMemory, offset: u64, len: usize) -> Vec<u8> {
        let mut out = BytesMut::new();
        memory.append_to(offset, len, &mut out);
        out.to_vec()
    }

    #[test]
    fn every_kind_of_page_starts_zeroed_keeps_bytes_and_is_zeroed_again() {
        for huge in [HugePages::Off, HugePages::Transparent, HugePages::Reserved] {
            let memory = RegionMemory::new(3 << 20, huge).unwrap();
            let data: Vec<u8> = (0..4096).map(|i| i as u8 ^ 0x5a).collect();
            for offset in [0, 4096, (3 << 20) - 4096] {
                assert_eq!(read(&memory, offset, 4096), vec![0; 4096]);
                memory.write(offset, &data);
                for len in [0, 1, 7, 8, 9, 100, 4095, 4096] {
                    assert_eq!(read(&memory, offset, len), data[..len], "{huge:?}, {len} bytes");
                    // SAFETY: nobody else has the region, and nothing is written before the next turn.
                    assert_eq!(unsafe { memory.lend(offset, len) }, &data[..len]);
                }
                let mut words = [[0; 8]; 512];
                memory.copy_words(offset, &mut words);
                assert_eq!(words.as_flattened(), data);
            }
            memory.zero();
            assert_eq!(read(&memory, 0, 3 << 20), vec![0; 3 << 20]);
        }
    }

    #[test]
    fn a_word_is_its_little_endian_bytes() {
        let memory = RegionMemory::new(4096, HugePages::Off).unwrap();
        memory.write(8, &0x0102_0304_0506_0708u64.to_le_bytes());
        assert_eq!(memory.word(8).load(Ordering::Relaxed), 0x0102_0304_0506_0708);
        assert_eq!(read(&memory, 8, 3), [8, 7, 6]);
    }

    #[test]
    fn sizes_that_are_not_words_are_refused() {
        for bytes in [0, 7, 12, 1 << 48, u64::MAX] {
            assert!(RegionMemory::new(bytes, HugePages::Off).is_err(), "{bytes}");
        }
    }

    #[test]
    fn the_edge_is_guarded() {
        let memory = RegionMemory::new(4096, HugePages::Off).unwrap();
        assert!(memory.contains(4088, 8) && !memory.contains(4088, 9) && !memory.contains(u64::MAX, 8));
        memory.prefetch(u64::MAX - 7, 64);
        for (offset, len) in [(4096, 8), (4, 8), (4088, 16), (u64::MAX - 7, 8)] {
            let outside =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&memory, offset, len)));
            assert!(outside.is_err(), "{len} bytes at {offset}");
        }
        for (offset, len) in [(4096, 1), (4088, 9), (u64::MAX, 2)] {
            // SAFETY: nobody else has the region, and nothing is written.
            let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unsafe {
                memory.lend(offset, len).len()
            }));
            assert!(outside.is_err(), "{len} bytes at {offset}");
        }
    }
}
