//! A strict reader of JSON bodies: every error names the field and what was expected there, and a field that is not known
//! is an error, never passed over.
//!
//! Values stay as they came ([`RawValue`]) until they are asked for, so that a body takes little more memory than its
//! text, whatever is in it.
//!
//! Invariant: nothing here holds more items than the caller's maximum.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use shine_common::ids::ExternalId;
use shine_common::metric::DIMENSION_MAX;
use shine_common::wire::{Fault, FaultCode};

/// Most fields of one object.
const FIELDS_MAX: usize = 64;
/// Characters of a value or a body that an error shows.
const SHOWN_MAX: usize = 40;

fn bad(message: String) -> Fault {
    Fault::new(FaultCode::BadRequest, message)
}

/// A value of a body, and where it stands in it.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    path: String,
    raw: &'a RawValue,
}

impl<'a> Field<'a> {
    /// The whole of a body.
    pub(super) fn body(bytes: &'a [u8]) -> Result<Self, Fault> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(bad("the body is empty: expected a JSON object".into()));
        }
        match serde_json::from_slice(bytes) {
            Ok(raw) => Ok(Self { path: String::new(), raw }),
            Err(error) => {
                Err(bad(format!("the body is not JSON: {error}, behind '{}'", before(bytes, &error))))
            }
        }
    }

    fn shown(&self) -> String {
        let text = self.raw.get();
        match text.char_indices().nth(SHOWN_MAX) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text.to_owned(),
        }
    }

    /// The error for a value that is not `what`.
    pub(super) fn expected(&self, what: impl fmt::Display) -> Fault {
        let at = if self.path.is_empty() { "the body" } else { &self.path };
        bad(format!("{at}: expected {what}, got {}", self.shown()))
    }

    /// An error about the value, in other words.
    pub(super) fn wrong(&self, what: impl fmt::Display) -> Fault {
        let at = if self.path.is_empty() { "the body" } else { &self.path };
        bad(format!("{at}: {what}"))
    }

    fn first(&self) -> u8 {
        self.raw.get().as_bytes()[0]
    }

    pub(super) fn is_null(&self) -> bool {
        self.raw.get() == "null"
    }

    pub(super) fn is_object(&self) -> bool {
        self.first() == b'{'
    }

    pub(super) fn is_array(&self) -> bool {
        self.first() == b'['
    }

    /// The fields of an object; one that is not in `known`, and not null, is an error.
    pub(super) fn object(&self, known: &[&str]) -> Result<Object<'a>, Fault> {
        let object = self.map()?;
        // One that is null says nothing.
        let is_unknown =
            |(name, raw): &&(String, &RawValue)| raw.get() != "null" && !known.contains(&name.as_str());
        match object.fields.iter().find(is_unknown) {
            None => Ok(object),
            Some((name, _)) => {
                let field = join(&self.path, name);
                Err(bad(format!("{field}: not a field here; expected some of {}", known.join(", "))))
            }
        }
    }

    /// The fields of an object, whatever their names.
    pub(super) fn map(&self) -> Result<Object<'a>, Fault> {
        if !self.is_object() {
            return Err(self.expected("an object"));
        }
        let fields =
            Deserializer::deserialize_map(&mut serde_json::Deserializer::from_str(self.raw.get()), Fields)
                .map_err(|error| self.wrong(reason(&error)))?;
        Ok(Object { path: self.path.clone(), fields })
    }

    /// The items of an array of at most `max`.
    pub(super) fn array(&self, max: usize) -> Result<Vec<Self>, Fault> {
        if !self.is_array() {
            return Err(self.expected("an array"));
        }
        let items = Deserializer::deserialize_seq(
            &mut serde_json::Deserializer::from_str(self.raw.get()),
            Items(max),
        )
        .map_err(|error| self.wrong(reason(&error)))?;
        let item = |(i, raw)| Self { path: format!("{}[{i}]", self.path), raw };
        Ok(items.into_iter().enumerate().map(item).collect())
    }

    pub(super) fn uint(&self, range: RangeInclusive<u64>) -> Result<u64, Fault> {
        let given = self.raw.get().parse::<u64>().ok().filter(|n| range.contains(n));
        given.ok_or_else(|| {
            self.expected(format_args!("a whole number, {} to {}", range.start(), range.end()))
        })
    }

    pub(super) fn number(&self) -> Result<f64, Fault> {
        let given = serde_json::from_str::<f64>(self.raw.get()).ok();
        given.ok_or_else(|| self.expected("a number"))
    }

    pub(super) fn boolean(&self) -> Result<bool, Fault> {
        match self.raw.get() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.expected("true or false")),
        }
    }

    pub(super) fn text(&self) -> Result<String, Fault> {
        serde_json::from_str(self.raw.get()).map_err(|_| self.expected("a string"))
    }

    /// A point id: a number, or a UUID in quotes.
    pub(super) fn id(&self) -> Result<ExternalId, Fault> {
        let given = match self.first() {
            b'"' => self
                .text()?
                .parse()
                .ok()
                // A number in quotes is another kind of value, and would name another point than a client means.
                .filter(|id| matches!(id, ExternalId::Uuid(_))),
            _ => self.raw.get().parse().ok().map(ExternalId::Num),
        };
        given.ok_or_else(|| {
            self.expected("a whole number from 0 to 18446744073709551615, or a UUID in quotes")
        })
    }

    /// An array of numbers: a vector.
    pub(super) fn numbers(&self) -> Result<Vec<f64>, Fault> {
        if !self.is_array() {
            return Err(self.expected("an array of numbers"));
        }
        Deserializer::deserialize_seq(&mut serde_json::Deserializer::from_str(self.raw.get()), Numbers)
            .map_err(|error| self.wrong(reason(&error)))
    }
}

/// The fields of an object. Those that are `null` count as absent.
#[derive(Debug)]
pub(super) struct Object<'a> {
    path: String,
    fields: Vec<(String, &'a RawValue)>,
}

impl<'a> Object<'a> {
    pub(super) fn get(&self, name: &str) -> Option<Field<'a>> {
        let (_, raw) = self.fields.iter().find(|(given, _)| given == name)?;
        Some(Field { path: join(&self.path, name), raw }).filter(|field| !field.is_null())
    }

    pub(super) fn need(&self, name: &str, what: &str) -> Result<Field<'a>, Fault> {
        self.get(name).ok_or_else(|| bad(format!("{}: missing; expected {what}", join(&self.path, name))))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|(given, _)| given == name)
    }

    /// Refuses fields that mean something we do not do. Passing over them would answer another question than was asked.
    pub(super) fn refuse(&self, names: &[&str], why: &str) -> Result<(), Fault> {
        match names.iter().find_map(|name| self.get(name)) {
            Some(field) => Err(field.wrong(why)),
            None => Ok(()),
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// What serde_json says, without the place: it counts from the start of the value, not of the body.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// The end of what could be read of a body that is not JSON.
fn before(bytes: &[u8], error: &serde_json::Error) -> String {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').take(error.line().saturating_sub(1));
    let end = (lines.map(<[u8]>::len).sum::<usize>() + error.column()).min(bytes.len());
    String::from_utf8_lossy(&bytes[end.saturating_sub(SHOWN_MAX)..end]).into_owned()
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields: Self::Value = Vec::new();
        while let Some((name, raw)) = map.next_entry::<String, &RawValue>()? {
            if fields.len() == FIELDS_MAX {
                return Err(A::Error::custom(format_args!("more than {FIELDS_MAX} fields")));
            }
            if fields.iter().any(|(given, _)| *given == name) {
                return Err(A::Error::custom(format_args!("the field {name} is there twice")));
            }
            fields.push((name, raw));
        }
        Ok(fields)
    }
}

struct Items(usize);

impl<'de> Visitor<'de> for Items {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(raw) = seq.next_element()? {
            if items.len() == self.0 {
                return Err(A::Error::custom(format_args!("expected at most {} items, got more", self.0)));
            }
            items.push(raw);
        }
        Ok(items)
    }
}

struct Numbers;

impl<'de> Visitor<'de> for Numbers {
    type Value = Vec<f64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<f64>, A::Error> {
        struct Number(usize);
        impl<'de> DeserializeSeed<'de> for Number {
            type Value = f64;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<f64, D::Error> {
                <f64 as serde::Deserialize>::deserialize(deserializer).map_err(|error| {
                    let text = error.to_string();
                    let why = text.split(" at line ").next().unwrap_or(&text);
                    D::Error::custom(format_args!("element {}: expected a number: {why}", self.0))
                })
            }
        }
        let mut numbers = Vec::new();
        while let Some(number) = seq.next_element_seed(Number(numbers.len()))? {
            if numbers.len() == DIMENSION_MAX {
                return Err(A::Error::custom(format_args!("more than {DIMENSION_MAX} numbers")));
            }
            numbers.push(number);
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error<T: fmt::Debug>(result: Result<T, Fault>) -> String {
        let fault = result.unwrap_err();
        assert_eq!(fault.code, FaultCode::BadRequest);
        fault.message
    }

    #[test]
    fn errors_name_the_field_and_what_is_expected() {
        let body = br#"{"limit": 0, "points": [{"id": 1}, {"id": -1, "vector": [1, null], "extra": {}}], "query": null}"#;
        let body = Field::body(body).unwrap();
        let object = body.object(&["limit", "points", "query"]).unwrap();
        assert!(object.get("query").is_none(), "null is absent");
        assert_eq!(error(object.need("query", "a vector")), "query: missing; expected a vector");
        let limit = object.get("limit").unwrap();
        assert_eq!(error(limit.uint(1..=10)), "limit: expected a whole number, 1 to 10, got 0");
        assert_eq!(limit.uint(0..=10).unwrap(), 0);
        assert_eq!(error(limit.object(&[])), "limit: expected an object, got 0");
        let points = object.get("points").unwrap();
        assert_eq!(error(points.array(1)), "points: expected at most 1 items, got more");
        let points = points.array(2).unwrap();
        let second = points[1].map().unwrap();
        assert!(
            error(second.get("id").unwrap().id()).starts_with("points[1].id: expected a whole number from 0")
        );
        let vector = error(second.get("vector").unwrap().numbers());
        assert_eq!(
            vector,
            "points[1].vector: element 1: expected a number: invalid type: null, expected f64"
        );
        let unknown = error(points[1].object(&["id", "vector"]));
        assert_eq!(unknown, "points[1].extra: not a field here; expected some of id, vector");
        assert_eq!(error(second.refuse(&["extra"], "not supported")), "points[1].extra: not supported");
    }

    #[test]
    fn ids_are_numbers_or_uuids() {
        let id = |text: &str| Field::body(text.as_bytes()).unwrap().id();
        assert_eq!(id("18446744073709551615").unwrap(), ExternalId::Num(u64::MAX));
        assert!(matches!(id("\"67e55044-10b1-426f-9247-bb680e5fe0c8\"").unwrap(), ExternalId::Uuid(_)));
        for text in ["\"7\"", "7.0", "18446744073709551616", "\"seven\"", "[7]", "true"] {
            assert!(error(id(text)).contains("a UUID in quotes"), "{text}");
        }
    }

    #[test]
    fn what_is_not_json_is_shown_where_it_ends() {
        let said = error(Field::body(b"{\"points\":[{\"id\":1,\n\"vector\":[1.0, NaN]}]}"));
        assert!(
            said.contains("not JSON") && said.contains("line 2") && said.contains("\"vector\":[1.0, N"),
            "{said}"
        );
        assert!(error(Field::body(b" \n")).contains("empty"));
        assert!(error(Field::body(b"\xff")).contains("not JSON"));
        assert!(error(Field::body(b"{\"a\":1,\"a\":2}").unwrap().object(&["a"])).contains("twice"));
        let many: Vec<String> = (0..=FIELDS_MAX).map(|i| format!("\"f{i}\":0")).collect();
        let many = format!("{{{}}}", many.join(","));
        assert!(error(Field::body(many.as_bytes()).unwrap().map()).contains("more than 64 fields"));
        let long = format!("[{}1]", "1,".repeat(DIMENSION_MAX));
        assert!(error(Field::body(long.as_bytes()).unwrap().numbers()).contains("more than 32768"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(body) = Field::body(&bytes) {
                let _ = (body.map(), body.array(4), body.numbers(), body.id(), body.text(), body.number());
            }
        }
    }
}
