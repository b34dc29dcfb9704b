//! Memory for the kernel to read from or write to, without a Rust reference to it.
//!
//! A guest writes to its RAM at any time, so neither `&[u8]` nor `IoSlice` may point there. These have the layout of
//! `struct iovec` and hold the lifetime only.

use std::marker::PhantomData;

use crate::map::copy_changing;

/// Memory that the kernel may read.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Outgoing<'a>(libc::iovec, PhantomData<&'a ()>);

/// Memory that the kernel may write.
#[repr(transparent)]
pub struct Incoming<'a>(libc::iovec, PhantomData<&'a mut ()>);

// SAFETY: an address and a length; the memory behind it is valid on every thread for 'a, and read volatile only.
unsafe impl Send for Outgoing<'_> {}
// SAFETY: an address and a length that nothing here dereferences; the memory behind it is valid on every thread for 'a.
unsafe impl Send for Incoming<'_> {}

impl Outgoing<'_> {
    /// # Safety
    /// `bytes` from `base` on are mapped readable for the lifetime.
    pub(crate) unsafe fn new(base: *const u8, bytes: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast_mut().cast(), iov_len: bytes }, PhantomData)
    }

    /// The length, bytes.
    pub fn bytes(&self) -> usize {
        self.0.iov_len
    }
}

impl<'a> From<&'a [u8]> for Outgoing<'a> {
    fn from(slice: &'a [u8]) -> Self {
        // SAFETY: a slice is readable for its lifetime.
        unsafe { Self::new(slice.as_ptr(), slice.len()) }
    }
}

impl Incoming<'_> {
    /// # Safety
    /// `bytes` from `base` on are mapped writable for the lifetime, and no Rust reference to them lives.
    pub(crate) unsafe fn new(base: *mut u8, bytes: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: bytes }, PhantomData)
    }

    /// The length, bytes.
    pub fn bytes(&self) -> usize {
        self.0.iov_len
    }
}

impl<'a> From<&'a mut [u8]> for Incoming<'a> {
    fn from(slice: &'a mut [u8]) -> Self {
        // SAFETY: an exclusive slice is writable for its lifetime.
        unsafe { Self::new(slice.as_mut_ptr(), slice.len()) }
    }
}

/// What [`advance`] works on.
pub(crate) trait IoVector {
    /// The `struct iovec`.
    fn vector(&mut self) -> &mut libc::iovec;
}

impl IoVector for Outgoing<'_> {
    fn vector(&mut self) -> &mut libc::iovec {
        &mut self.0
    }
}

impl IoVector for Incoming<'_> {
    fn vector(&mut self) -> &mut libc::iovec {
        &mut self.0
    }
}

/// Removes the first `bytes`, which have been transferred, and with them every vector that is empty.
pub(crate) fn advance<V: IoVector>(mut vectors: &mut [V], mut bytes: usize) -> &mut [V] {
    while let Some((first, _)) = vectors.split_first_mut() {
        let vector = first.vector();
        if bytes < vector.iov_len {
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(bytes).cast();
            vector.iov_len -= bytes;
            break;
        }
        bytes -= vector.iov_len;
        vectors = &mut vectors[1..];
    }
    vectors
}

/// Copies as much of `vectors`, in order, as `out` has room for. Returns the vectors that are left, and the number of
/// bytes copied.
///
/// It serves where the kernel cannot send straight from guest RAM. A guest may write meanwhile, so each word of the
/// copy was in memory at some moment, and the copy stays as it is. It reads memory directly, with the consequences for
/// holes that [`crate::map`] describes.
pub fn copy_out<'v, 'a>(mut vectors: &'v mut [Outgoing<'a>], out: &mut [u8]) -> (&'v mut [Outgoing<'a>], usize) {
    let mut copied = 0;
    while let Some(first) = vectors.first()
        && copied < out.len()
    {
        let bytes = first.bytes().min(out.len() - copied);
        // SAFETY: readable for as long as the vector lives, by the promise it was made with.
        unsafe { copy_changing(first.0.iov_base.cast(), &mut out[copied..copied + bytes]) };
        copied += bytes;
        vectors = advance(vectors, bytes);
    }
    (vectors, copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_fills_the_room_and_goes_on_where_it_stopped() {
        let bytes: Vec<u8> = (0..1000u32).map(|n| (n % 251) as u8).collect();
        for room in [1, 15, 16, 17, 100, 999, 1000, 2000] {
            // Parts of odd lengths at odd places, an empty one among them.
            let mut vectors =
                [&bytes[..0], &bytes[..7], &bytes[7..301], &bytes[301..301], &bytes[301..]].map(Outgoing::from);
            let (mut left, mut out, mut all) = (&mut vectors[..], vec![0; room], Vec::new());
            loop {
                let (rest, copied) = copy_out(left, &mut out);
                if copied == 0 {
                    break;
                }
                assert!(copied == room || rest.is_empty());
                all.extend_from_slice(&out[..copied]);
                left = rest;
            }
            assert!(all == bytes, "with room for {room}");
        }
    }

    #[test]
    fn advancing_splits_a_vector_and_drops_the_empty_ones() {
        let (a, b, c) = ([0u8; 3], [0u8; 0], [0u8; 5]);
        let mut vectors = [Outgoing::from(&a[..]), Outgoing::from(&b[..]), Outgoing::from(&c[..])];
        let left = advance(&mut vectors, 1);
        assert_eq!(left.iter().map(Outgoing::bytes).collect::<Vec<_>>(), [2, 0, 5]);
        let left = advance(left, 2);
        assert_eq!(left.iter().map(Outgoing::bytes).collect::<Vec<_>>(), [5]);
        assert!(advance(left, 5).is_empty());
    }
}
