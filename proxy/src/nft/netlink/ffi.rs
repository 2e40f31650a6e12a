//! libnftnl's objects: allocated, filled, read and freed; and a watched socket. The only unsafe code of this module.
//!
//! Every attribute goes in and out as plain bytes with a length (`*_set_data`, `*_get_data`), so that no accessor of
//! libnftnl that aborts the process on a wrong width is ever called. Strings end with a zero byte.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::socket::Socket;
use nftnl_sys as sys;
use tokio::io::{Interest, unix::AsyncFd};

/// `NFT_DATA_VALUE_MAXLEN`: libnftnl copies values into buffers of this size without a check.
const VALUE_MAX: usize = 64;
/// Room for one message: an element message stays under 64 KiB (`nla_len` has 16 bits), a rule has at most 128 expressions.
const MESSAGE_ROOM: usize = 256 * 1024;

/// The functions of one kind of object.
pub trait Kind {
    type Raw;
    /// A new object, owned by the caller.
    fn alloc() -> *mut Self::Raw;
    /// # Safety
    /// `raw` came from `alloc`, is owned by the caller and not used afterwards.
    unsafe fn free(raw: *mut Self::Raw);
    /// # Safety
    /// `raw` is live and `data` is readable for `len` bytes; strings end with a zero byte; values have at most 64 bytes.
    unsafe fn set(raw: *mut Self::Raw, attribute: u16, data: *const c_void, len: u32);
    /// # Safety
    /// `raw` is live; the result points into it and `len` is its size.
    unsafe fn get(raw: *mut Self::Raw, attribute: u16, len: *mut u32) -> *const c_void;
}

/// Kinds that are a message of their own.
pub trait Message: Kind {
    /// # Safety
    /// `header` begins a buffer with room for the whole message; `raw` is live.
    unsafe fn build(header: *mut libc::nlmsghdr, raw: *mut Self::Raw);
    /// # Safety
    /// `header` begins a complete message; `raw` is live.
    unsafe fn parse(header: *const libc::nlmsghdr, raw: *mut Self::Raw) -> i32;
}

fn allocate<T>(alloc: unsafe extern "C" fn() -> *mut T) -> *mut T {
    // SAFETY: libnftnl's allocators have no precondition; the callers own the result.
    unsafe { alloc() }
}

macro_rules! kind {
    ($kind:ident, $raw:ty, $alloc:expr, $free:path, $set:path, $get:path) => {
        pub enum $kind {}
        impl Kind for $kind {
            type Raw = $raw;
            fn alloc() -> *mut $raw {
                $alloc
            }
            unsafe fn free(raw: *mut $raw) {
                // SAFETY: upheld by the caller, see the trait.
                unsafe { $free(raw) }
            }
            unsafe fn set(raw: *mut $raw, attribute: u16, data: *const c_void, len: u32) {
                // SAFETY: upheld by the caller, see the trait.
                unsafe { $set(raw, attribute, data, len) };
            }
            unsafe fn get(raw: *mut $raw, attribute: u16, len: *mut u32) -> *const c_void {
                // SAFETY: upheld by the caller, see the trait.
                unsafe { $get(raw, attribute, len) }
            }
        }
    };
    ($kind:ident, $raw:ty, $alloc:expr, $free:path, $set:path, $get:path, $build:path, $parse:path) => {
        kind!($kind, $raw, $alloc, $free, $set, $get);
        impl Message for $kind {
            unsafe fn build(header: *mut libc::nlmsghdr, raw: *mut $raw) {
                // SAFETY: upheld by the caller, see the trait.
                unsafe { $build(header, raw) }
            }
            unsafe fn parse(header: *const libc::nlmsghdr, raw: *mut $raw) -> i32 {
                // SAFETY: upheld by the caller, see the trait.
                unsafe { $parse(header, raw) }
            }
        }
    };
}

kind!(
    Table,
    sys::nftnl_table,
    allocate(sys::nftnl_table_alloc),
    sys::nftnl_table_free,
    sys::nftnl_table_set_data,
    sys::nftnl_table_get_data,
    sys::nftnl_table_nlmsg_build_payload,
    sys::nftnl_table_nlmsg_parse
);
kind!(
    Chain,
    sys::nftnl_chain,
    allocate(sys::nftnl_chain_alloc),
    sys::nftnl_chain_free,
    sys::nftnl_chain_set_data,
    sys::nftnl_chain_get_data,
    sys::nftnl_chain_nlmsg_build_payload,
    sys::nftnl_chain_nlmsg_parse
);
kind!(
    Rule,
    sys::nftnl_rule,
    allocate(sys::nftnl_rule_alloc),
    sys::nftnl_rule_free,
    sys::nftnl_rule_set_data,
    sys::nftnl_rule_get_data,
    sys::nftnl_rule_nlmsg_build_payload,
    sys::nftnl_rule_nlmsg_parse
);
kind!(
    Set,
    sys::nftnl_set,
    allocate(sys::nftnl_set_alloc),
    sys::nftnl_set_free,
    sys::nftnl_set_set_data,
    sys::nftnl_set_get_data,
    sys::nftnl_set_nlmsg_build_payload,
    sys::nftnl_set_nlmsg_parse
);
kind!(
    Elements,
    sys::nftnl_set,
    allocate(sys::nftnl_set_alloc),
    sys::nftnl_set_free,
    sys::nftnl_set_set_data,
    sys::nftnl_set_get_data,
    sys::nftnl_set_elems_nlmsg_build_payload,
    sys::nftnl_set_elems_nlmsg_parse
);
kind!(
    Element,
    sys::nftnl_set_elem,
    allocate(sys::nftnl_set_elem_alloc),
    sys::nftnl_set_elem_free,
    sys::nftnl_set_elem_set,
    sys::nftnl_set_elem_get
);
kind!(
    Expression,
    sys::nftnl_expr,
    std::ptr::null_mut(),
    sys::nftnl_expr_free,
    sys::nftnl_expr_set,
    sys::nftnl_expr_get
);

/// An object of libnftnl that we own.
pub struct Object<K: Kind>(NonNull<K::Raw>);

impl<K: Kind> Drop for Object<K> {
    fn drop(&mut self) {
        // SAFETY: `self.0` is owned by `self` (it came from `alloc`, and `into_raw` forgets `self`) and dies with it.
        unsafe { K::free(self.0.as_ptr()) }
    }
}

/// An object that belongs to another one.
pub struct Borrowed<'a, K: Kind>(NonNull<K::Raw>, PhantomData<&'a ()>);

fn get<'a, K: Kind>(raw: NonNull<K::Raw>, attribute: u16) -> Option<&'a [u8]> {
    let mut len = 0;
    // SAFETY: `raw` is live: the callers hold its owner for 'a.
    let data = unsafe { K::get(raw.as_ptr(), attribute, &mut len) };
    // SAFETY: libnftnl answered null (attribute absent) or a pointer to `len` bytes inside the object, which nobody changes
    // while the callers' shared borrow for 'a lives.
    (!data.is_null()).then(|| unsafe { std::slice::from_raw_parts(data.cast(), len as usize) })
}

fn as_u32(data: &[u8]) -> Option<u32> {
    data.try_into().ok().map(u32::from_ne_bytes)
}

fn as_u64(data: &[u8]) -> Option<u64> {
    data.try_into().ok().map(u64::from_ne_bytes)
}

fn as_string(data: &[u8]) -> Option<String> {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    std::str::from_utf8(&data[..end]).ok().map(str::to_owned)
}

macro_rules! getters {
    ($($type:tt)*) => {
        $($type)* {
            /// The attribute's bytes, if it is set.
            pub fn bytes(&self, attribute: impl Into<u64>) -> Option<&[u8]> {
                get::<K>(self.0, attribute.into() as u16)
            }
            pub fn number(&self, attribute: impl Into<u64>) -> Option<u32> {
                self.bytes(attribute).and_then(as_u32)
            }
            pub fn number64(&self, attribute: impl Into<u64>) -> Option<u64> {
                self.bytes(attribute).and_then(as_u64)
            }
            pub fn string(&self, attribute: impl Into<u64>) -> Option<String> {
                self.bytes(attribute).and_then(as_string)
            }
        }
    };
}
getters!(impl<K: Kind> Object<K>);
getters!(impl<K: Kind> Borrowed<'_, K>);

impl<K: Kind> Object<K> {
    /// An empty object (not for [`Expression`], which needs a name).
    pub fn new() -> Self {
        Self(NonNull::new(K::alloc()).expect("libnftnl allocates, or memory is exhausted"))
    }

    /// Sets an attribute to these bytes: a value of at most 64 bytes, or user data.
    pub fn set_bytes(&mut self, attribute: impl Into<u64>, data: &[u8]) -> &mut Self {
        // SAFETY: the object is live and ours; `data` is readable for its length.
        unsafe { K::set(self.0.as_ptr(), attribute.into() as u16, data.as_ptr().cast(), data.len() as u32) };
        self
    }

    /// Sets a key or value, which libnftnl keeps in a fixed buffer.
    pub fn set_value(&mut self, attribute: impl Into<u64>, data: &[u8]) -> &mut Self {
        assert!(data.len() <= VALUE_MAX, "the encoder refuses longer values");
        self.set_bytes(attribute, data)
    }

    pub fn set_number(&mut self, attribute: impl Into<u64>, value: u32) -> &mut Self {
        self.set_bytes(attribute, &value.to_ne_bytes())
    }

    pub fn set_number64(&mut self, attribute: impl Into<u64>, value: u64) -> &mut Self {
        self.set_bytes(attribute, &value.to_ne_bytes())
    }

    /// Sets a string; it must not contain a zero byte (what follows one is cut).
    pub fn set_string(&mut self, attribute: impl Into<u64>, value: &str) -> &mut Self {
        let mut data = value.as_bytes().to_vec();
        data.push(0);
        self.set_bytes(attribute, &data)
    }

    fn into_raw(self) -> *mut K::Raw {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }
}

impl Object<Expression> {
    /// An expression by its kernel name; `None` if this libnftnl does not know it.
    pub fn expression(name: &CStr) -> Self {
        // SAFETY: `name` is a C string; we own the result.
        let raw = unsafe { sys::nftnl_expr_alloc(name.as_ptr()) };
        Self(NonNull::new(raw).expect("libnftnl knows the expressions that Tandem uses since 1.0.6"))
    }
}

impl Object<Rule> {
    pub fn push(&mut self, expression: Object<Expression>) {
        // SAFETY: both objects are live; the rule becomes the owner of the expression and frees it.
        unsafe { sys::nftnl_rule_add_expr(self.0.as_ptr(), expression.into_raw()) }
    }

    pub fn for_each(&self, mut f: impl FnMut(&Borrowed<'_, Expression>)) {
        // SAFETY: the rule outlives the iterator, which is destroyed below and not used afterwards; each expression belongs
        // to the rule, which nobody changes meanwhile.
        unsafe {
            let iter = sys::nftnl_expr_iter_create(self.0.as_ptr());
            if iter.is_null() {
                return;
            }
            while let Some(raw) = NonNull::new(sys::nftnl_expr_iter_next(iter)) {
                f(&Borrowed(raw, PhantomData));
            }
            sys::nftnl_expr_iter_destroy(iter);
        }
    }
}

impl Object<Elements> {
    pub fn push(&mut self, element: Object<Element>) {
        // SAFETY: both objects are live; the set becomes the owner of the element and frees it.
        unsafe { sys::nftnl_set_elem_add(self.0.as_ptr(), element.into_raw()) }
    }

    pub fn for_each(&self, mut f: impl FnMut(&Borrowed<'_, Element>)) {
        // SAFETY: as in `Object::<Rule>::for_each`, with the elements of a set.
        unsafe {
            let iter = sys::nftnl_set_elems_iter_create(self.0.as_ptr());
            if iter.is_null() {
                return;
            }
            while let Some(raw) = NonNull::new(sys::nftnl_set_elems_iter_next(iter)) {
                f(&Borrowed(raw, PhantomData));
            }
            sys::nftnl_set_elems_iter_destroy(iter);
        }
    }
}

/// A socket that the current tokio runtime watches for something to read.
///
/// # Panics
/// Outside of a tokio runtime.
pub fn watch(socket: Socket) -> std::io::Result<AsyncFd<Socket>> {
    // SAFETY: the socket owns its descriptor, has no way to change or close it before it is dropped, and nothing in this module
    // puts another socket in its place: `monitor` only takes `&mut` of the whole to receive.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(Into::into)
}

/// A buffer aligned for netlink headers, in which messages are built and received.
pub struct Scratch(Vec<u64>);

impl Scratch {
    pub fn new() -> Self {
        Self(vec![0; MESSAGE_ROOM / 8])
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the vector's memory is initialised, `u8` has no alignment and any value is valid for both types.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 8) }
    }

    /// Builds one nftables message: header with these fields, then the object's payload.
    pub fn build<K: Message>(&mut self, kind: u16, family: u16, flags: u16, seq: u32, object: &mut Object<K>) -> &[u8] {
        let start = self.0.as_mut_ptr();
        // SAFETY: the buffer is aligned and has `MESSAGE_ROOM` bytes, more than any message that the encoder makes (it cuts
        // element lists at 60,000 bytes and limits rules to 128 expressions); `object` is live.
        let len = unsafe {
            let header = sys::nftnl_nlmsg_build_hdr(start.cast(), kind, family, flags, seq);
            K::build(header, object.0.as_ptr());
            (*header).nlmsg_len as usize
        };
        assert!(len <= MESSAGE_ROOM, "a message has at most {MESSAGE_ROOM} bytes");
        &self.bytes_mut()[..len.next_multiple_of(4)]
    }
}

/// Reads one message of the kernel; `None` if libnftnl cannot.
pub fn parse<K: Message>(message: &[u8]) -> Option<Object<K>> {
    let object = Object::<K>::new();
    let header_len = size_of::<libc::nlmsghdr>();
    let claimed = message.get(..4).and_then(as_u32)? as usize;
    if message.len() < header_len + 4 || claimed > message.len() {
        return None;
    }
    let aligned: Vec<u64>;
    let start: *const libc::nlmsghdr = if message.as_ptr().cast::<libc::nlmsghdr>().is_aligned() {
        message.as_ptr().cast()
    } else {
        aligned = message
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
            .collect();
        aligned.as_ptr().cast()
    };
    // SAFETY: `start` is aligned and begins `message.len()` readable bytes, at least as many as the header claims (checked
    // above); libnftnl checks the attributes inside against that length.
    let result = unsafe { K::parse(start, object.0.as_ptr()) };
    (result >= 0).then_some(object)
}
