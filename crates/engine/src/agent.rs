//! The client of the library inside QEMU.
