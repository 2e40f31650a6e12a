//! Takes a protobuf list apart while it arrives, so that never more than one object of it is held.
//!
//! A Kubernetes protobuf answer is the four bytes `k8s\0` and a `runtime.Unknown` (`k8s.io/apimachinery`
//! `pkg/runtime/generated.proto`), the field `raw` of which is the list: `metadata` is its field 1, each object a field 2.

use prost::bytes::{Buf, Bytes, BytesMut};

const MAGIC: &[u8] = b"k8s\0";
/// Field `raw` of `runtime.Unknown`.
const RAW: u64 = 2;
/// No object is so large: etcd takes 1.5 MiB by default.
const FIELD_MAX: u64 = 64 << 20;

/// A field of a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// `ListMeta`, encoded.
    Metadata(Bytes),
    /// An object, encoded.
    Item(Bytes),
}

/// This is no protobuf list.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a list in Kubernetes' protobuf encoding: {0}")]
pub(super) struct Malformed(&'static str);

#[derive(Default)]
pub(super) struct Splitter {
    buffer: BytesMut,
    place: Place,
}

#[derive(Default)]
enum Place {
    #[default]
    Start,
    /// Between the fields of the envelope; whether the list was among them.
    Envelope { listed: bool },
    /// In the list, of which so many bytes are left.
    List { left: u64 },
}

enum Value {
    Number,
    Bytes(u64),
}

/// Number and value of a field, and the length of both where the value is a number, else of what is before the bytes.
struct Field {
    number: u64,
    value: Value,
    length: usize,
}

impl Splitter {
    /// More of the answer.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
    }

    /// The next part, `None` if more of the answer is needed.
    pub(super) fn next(&mut self) -> Result<Option<Part>, Malformed> {
        loop {
            match self.place {
                Place::Start => {
                    if self.buffer.len() < MAGIC.len() {
                        return Ok(None);
                    }
                    if !self.buffer.starts_with(MAGIC) {
                        return Err(Malformed("it does not begin with k8s"));
                    }
                    self.buffer.advance(MAGIC.len());
                    self.place = Place::Envelope { listed: false };
                }
                Place::Envelope { listed } => {
                    let Some(field) = field(&self.buffer)? else { return Ok(None) };
                    match field.value {
                        Value::Bytes(left) if field.number == RAW && !listed => {
                            self.buffer.advance(field.length);
                            self.place = Place::List { left };
                        }
                        _ if self.take(&field)?.is_none() => return Ok(None),
                        _ => {}
                    }
                }
                Place::List { left: 0 } => self.place = Place::Envelope { listed: true },
                Place::List { left } => {
                    let Some(field) = field(&self.buffer)? else { return Ok(None) };
                    let Some(bytes) = self.take(&field)? else { return Ok(None) };
                    let whole = (field.length + bytes.len()) as u64;
                    let left = left.checked_sub(whole).ok_or(Malformed("a field is longer than the list"))?;
                    self.place = Place::List { left };
                    match field.number {
                        1 => return Ok(Some(Part::Metadata(bytes))),
                        2 => return Ok(Some(Part::Item(bytes))),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Whether the answer may end here.
    pub(super) fn complete(&self) -> bool {
        self.buffer.is_empty() && matches!(self.place, Place::Envelope { listed: true } | Place::List { left: 0 })
    }

    /// The whole field, off the buffer; its bytes.
    fn take(&mut self, field: &Field) -> Result<Option<Bytes>, Malformed> {
        let length = match field.value {
            Value::Number => 0,
            Value::Bytes(length) if length > FIELD_MAX => return Err(Malformed("a field is too long")),
            Value::Bytes(length) => length as usize,
        };
        if self.buffer.len() < field.length + length {
            return Ok(None);
        }
        self.buffer.advance(field.length);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

/// Reads what is at the beginning of `buffer`; `None` if it is not there yet.
fn field(buffer: &[u8]) -> Result<Option<Field>, Malformed> {
    let Some((key, key_length)) = varint(buffer)? else { return Ok(None) };
    let Some((value, value_length)) = varint(&buffer[key_length..])? else { return Ok(None) };
    let value = match key & 7 {
        0 => Value::Number,
        2 => Value::Bytes(value),
        _ => return Err(Malformed("an unexpected wire type")),
    };
    Ok(Some(Field { number: key >> 3, value, length: key_length + value_length }))
}

/// A number and its length; `None` if its end is not there yet.
fn varint(buffer: &[u8]) -> Result<Option<(u64, usize)>, Malformed> {
    let mut value = 0_u64;
    for (index, byte) in buffer.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Ok(Some((value, index + 1)));
        }
    }
    if buffer.len() < 10 { Ok(None) } else { Err(Malformed("a number is too long")) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use prost::encoding::encode_varint;

    fn bytes_field(number: u64, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        encode_varint(number << 3 | 2, &mut out);
        encode_varint(bytes.len() as u64, &mut out);
        out.extend_from_slice(bytes);
        out
    }

    /// An answer with one message in it, as kube-apiserver writes it.
    pub(crate) fn envelope(raw: &[u8]) -> Vec<u8> {
        let type_meta = [bytes_field(1, b"v1"), bytes_field(2, b"SomethingList")].concat();
        [MAGIC.to_vec(), bytes_field(1, &type_meta), bytes_field(2, raw), bytes_field(3, b""), bytes_field(4, b"")]
            .concat()
    }

    /// A list of encoded objects.
    pub(crate) fn list(metadata: &[u8], items: &[Vec<u8>]) -> Vec<u8> {
        let mut raw = bytes_field(1, metadata);
        items.iter().for_each(|item| raw.extend(bytes_field(2, item)));
        envelope(&raw)
    }

    fn parts(answer: &[u8], chunk: usize) -> Result<(Vec<Part>, bool), Malformed> {
        let (mut splitter, mut parts) = (Splitter::default(), Vec::new());
        for chunk in answer.chunks(chunk) {
            splitter.push(chunk);
            while let Some(part) = splitter.next()? {
                parts.push(part);
            }
        }
        Ok((parts, splitter.complete()))
    }

    #[test]
    fn a_list_is_split_wherever_its_chunks_end() {
        let long = vec![7; 300];
        let answer = list(b"meta", &[b"one".to_vec(), Vec::new(), long.clone()]);
        let expected = [
            Part::Metadata(Bytes::from_static(b"meta")),
            Part::Item(Bytes::from_static(b"one")),
            Part::Item(Bytes::new()),
            Part::Item(long.into()),
        ];
        for chunk in 1..=answer.len() {
            assert_eq!(parts(&answer, chunk), Ok((expected.iter().map(clone).collect(), true)), "{chunk}");
        }
        assert_eq!(parts(&envelope(b""), 100), Ok((Vec::new(), true)));
    }

    fn clone(part: &Part) -> Part {
        match part {
            Part::Metadata(bytes) => Part::Metadata(bytes.clone()),
            Part::Item(bytes) => Part::Item(bytes.clone()),
        }
    }

    #[test]
    fn an_answer_that_ends_early_is_not_complete() {
        let whole = list(b"meta", &[b"one".to_vec()]);
        // Without the two empty fields at the end it is.
        for length in 0..whole.len() - 4 {
            assert!(!parts(&whole[..length], 1000).unwrap().1, "{length}");
        }
        assert!(parts(&whole[..whole.len() - 4], 1000).unwrap().1);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        assert!(parts(b"{\"kind\": \"ServiceList\"}", 100).is_err());
        // An item that is longer than the list, one of absurd length, a number without end, a wire type of no use here.
        for raw in [vec![0x12, 2, 1], vec![0x12, 0xff, 0xff, 0xff, 0xff, 0x0f], vec![0xff; 11], vec![0x11, 1]] {
            let answer = [envelope(&raw), vec![0; 16]].concat();
            assert!(parts(&answer, 1000).is_err() || !parts(&answer, 1000).unwrap().1, "{raw:?}");
        }
    }
}
